"""The workers' shared code: their data, the parameters of the model by name, and their command line."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from sklearn.datasets import load_digits

NUM_WORKERS, NUM_STEPS, RATE = 3, 40, 0.5
SHAPES = {"0.weight": (32, 64), "0.bias": (32,), "2.weight": (10, 32), "2.bias": (10,)}
"""A network with one hidden layer, tanh. Workers must agree on names: these are those of torch.nn.Sequential."""


@dataclass(frozen=True)
class Task:
    """A worker's task: the server, the name of the run, its share of the data, and where to save its weights."""

    address: str
    name: str
    share: int
    save: str

    @classmethod
    def from_command_line(cls) -> "Task":
        """Reads the command line."""
        parser = argparse.ArgumentParser()
        parser.add_argument("address", nargs="?", default="localhost:50051")
        parser.add_argument("--name", default="mixed-digits", help="the training run: the same for all workers")
        parser.add_argument("--share", type=int, default=0, help=f"which of {NUM_WORKERS} shares of the data")
        parser.add_argument("--save", default="", help="a file for the weights")
        return cls(**vars(parser.parse_args()))

    def save_weights(self, weights: Mapping[str, np.ndarray]) -> None:
        """Saves the weights, if there is a file for them."""
        if self.save:
            np.savez(self.save, **{name: np.asarray(each) for name, each in weights.items()})


def share(number: int, of: int = NUM_WORKERS) -> tuple[np.ndarray, np.ndarray]:
    """Returns every third digit: images, float32 [599, 64], and labels, int64 [599]."""
    images, labels = load_digits(return_X_y=True)
    return (images[number::of] / 16).astype(np.float32), labels[number::of]


def new_weights() -> dict[str, np.ndarray]:
    """Returns random weights; those of the first worker become everybody's."""
    random = np.random.default_rng()
    return {name: random.uniform(-0.2, 0.2, shape).astype(np.float32) for name, shape in SHAPES.items()}
