"""Tensors that live on the server, and what they may take."""
