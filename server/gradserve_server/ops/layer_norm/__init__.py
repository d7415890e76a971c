"""LayerNorm and its gradient, with the semantics of PyTorch's layer_norm."""
