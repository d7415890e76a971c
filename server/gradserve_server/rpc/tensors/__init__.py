"""TensorService."""
