"""LayerNorm on a GPU."""
