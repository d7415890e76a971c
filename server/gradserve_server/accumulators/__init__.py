"""Conditional accumulators: many workers' gradients, averaged in rounds."""
