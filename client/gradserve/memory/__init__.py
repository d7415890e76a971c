"""Memory that tensors are received into."""
