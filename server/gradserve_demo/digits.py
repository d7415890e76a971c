"""The handwritten digits that come with scikit-learn, 1797 images of 8 x 8 pixels, and the batches they are cut into.

The batches follow from a seed, so the workers can divide the data without talking to each other.
"""

from dataclasses import dataclass

import numpy as np

from gradserve_demo.network import FloatArray, IntArray

_TEST_SHARE = 0.2
_BRIGHTEST = 16


@dataclass(frozen=True)
class Batches:
    """Cuts a shuffled data set into joint batches, and each joint batch into one share per worker."""

    num_examples: int
    """Number of examples in the data set."""

    num_workers: int
    """Number of shares in a joint batch."""

    batch_size: int
    """Examples in the share of one worker."""

    seed: int
    """Decides the order of the examples in every epoch."""

    def __post_init__(self) -> None:
        if min(self.num_workers, self.batch_size) < 1:
            raise ValueError("num_workers and batch_size must be at least 1")
        if self.steps_per_epoch < 1:
            raise ValueError(
                f"a joint batch takes {self.num_workers} * {self.batch_size} examples, "
                f"but there are only {self.num_examples}"
            )

    @property
    def steps_per_epoch(self) -> int:
        """Joint batches in one epoch; the rest, which does not fill a batch, is left out."""
        return self.num_examples // (self.num_workers * self.batch_size)

    def joint(self, step: int) -> IntArray:
        """Returns the examples of all workers at a step."""
        epoch, position = divmod(step, self.steps_per_epoch)
        order = np.random.default_rng((self.seed, epoch)).permutation(self.num_examples)
        size = self.num_workers * self.batch_size
        return order[position * size : (position + 1) * size]

    def share(self, step: int, worker: int) -> IntArray:
        """Returns the examples of one worker at a step."""
        return self.joint(step)[worker * self.batch_size : (worker + 1) * self.batch_size]


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
