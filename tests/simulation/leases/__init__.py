"""What leases end: private accumulators and layers, and stored tensors."""
