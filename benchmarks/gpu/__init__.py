"""Benchmarks of kernels on a GPU, beside PyTorch and the bus: `python -m benchmarks.gpu`."""
