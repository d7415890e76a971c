"""Tensors that live on the server, and the quotas for them."""
