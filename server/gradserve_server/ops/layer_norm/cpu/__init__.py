"""LayerNorm on the host."""
