"""Batch normalization layers, and the workers that share them."""
