"""Writes golden.safetensors with the package safetensors and PyTorch: python tests/client/parameters/make_golden.py."""

from pathlib import Path

import torch
from safetensors.torch import save_file

save_file(
    {
        "w": torch.arange(6, dtype=torch.float32).reshape(2, 3),
        "b": torch.tensor([1.0, -2.5], dtype=torch.bfloat16),
        "scale": torch.tensor(0.5, dtype=torch.float64),
        "empty": torch.zeros((0, 2), dtype=torch.float16),
    },
    Path(__file__).with_name("golden.safetensors"),
    metadata={"format": "pt"},
)
