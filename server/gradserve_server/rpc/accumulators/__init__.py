"""AccumulatorService."""
