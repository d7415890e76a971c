"""The handwritten digits that come with scikit-learn: 1797 images of 8 x 8 pixels."""

from dataclasses import dataclass

import numpy as np

from gradserve_demo.arrays import FloatArray, IntArray

_TEST_SHARE = 0.2
_BRIGHTEST = 16


@dataclass(frozen=True)
class Digits:
    """Images as rows of 64 numbers from 0 to 1, and the digit that each shows."""

    train_images: FloatArray
    train_labels: IntArray
    test_images: FloatArray
    test_labels: IntArray


def load_digits(seed: int) -> Digits:
    """Returns the digits, one fifth of them for testing; nothing is downloaded."""
    # Imported here because it takes longer than everything else in this package together.
    from sklearn import datasets

    bunch = datasets.load_digits()
    images = (bunch.data / _BRIGHTEST).astype(np.float32)
    labels = bunch.target.astype(np.int64)
    # Neighbours in the file come from the same writer: shuffle before the split.
    order = np.random.default_rng(seed).permutation(len(labels))
    split = int(len(labels) * (1 - _TEST_SHARE))
    train, test = order[:split], order[split:]
    return Digits(images[train], labels[train], images[test], labels[test])
