"""Initial values from a seed."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

import torch

_LOCK = Lock()


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Makes what is drawn in the block depend on the seed alone: all threads share PyTorch's generator."""
    with _LOCK:
        torch.manual_seed(seed)
        yield
