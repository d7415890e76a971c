"""What an aggregator does with gradients before it passes them on: which go together, and their sums."""
