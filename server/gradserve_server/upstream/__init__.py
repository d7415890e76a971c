"""The aggregator's batches of gradients, their sums, and the newest averages from upstream."""
