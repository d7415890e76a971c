"""A batch of images, its moments, and how near two results must be."""

from typing import Any

import numpy as np

X = np.random.RandomState(0).standard_normal((4, 5, 6, 3)).astype(np.float32) * 2 + 1


DY = np.random.RandomState(1).standard_normal(X.shape).astype(np.float32)


AXES = (0, 1, 2)


MEAN = X.mean(AXES, dtype=np.float64)


VARIANCE = X.var(AXES, dtype=np.float64)


COUNT = X.size // 3


NORMALIZED = (X - MEAN) / np.sqrt(VARIANCE + 0.001)


LARGE = np.random.RandomState(2).standard_normal((64, 32, 32, 16)).astype(np.float32)
"""Of more than what travels inside a message."""


def close(ours: Any, theirs: Any) -> None:
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)
