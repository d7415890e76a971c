"""Several servers that share out accumulators."""
