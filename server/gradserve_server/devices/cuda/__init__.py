"""NVIDIA GPUs: memory, streams, programs and cuDNN."""
