"""The accumulators of an aggregator: those of the server upstream, with gradients of several workers in one."""
