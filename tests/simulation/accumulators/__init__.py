"""Accumulators, and the workers that share them."""
