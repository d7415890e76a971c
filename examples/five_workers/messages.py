"""The messages, the command line and the last words that the workers in Python share."""

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import gradserve

NUM_MESSAGES = 200
MESSAGE_WORDS = 9
IDLE_LEASE = 3600.0
"""Parameters that nobody has used for so many seconds end by themselves."""


def make_messages(seed: str, num_words: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the messages of one worker.

    Returns:
        How often each word is in each message, float32 [200, words]; and 1 for each message that is unwanted, as it has
        more even than odd words, float32 [200].
    """
    words = np.random.default_rng(list(seed.encode())).integers(num_words, size=(NUM_MESSAGES, MESSAGE_WORDS))
    counts = np.zeros((NUM_MESSAGES, num_words), np.float32)
    np.add.at(counts, (np.arange(NUM_MESSAGES)[:, None], words), 1)
    return counts, (2 * np.sum(words % 2 == 0, axis=1) > MESSAGE_WORDS).astype(np.float32)


def zeros(num_words: int) -> dict[str, np.ndarray]:
    """Returns the parameters with which the first worker begins."""
    return {"weights": np.zeros(num_words, np.float32), "bias": np.zeros((), np.float32)}


def rules(num_required: int) -> dict[str, Any]:
    """Returns what is agreed on for `client.parameters`."""
    return {
        "update": "gradient",
        "optimizer": gradserve.optim.Adam(0.1),
        "num_required": num_required,
        "idle_lease": IDLE_LEASE,
    }


def options(language: str) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="one worker of a training run")
    parser.add_argument("address", metavar="HOST:PORT")
    parser.add_argument("--run", default="words", help="name of the run")
    parser.add_argument("--worker", default=f"{language}-{os.getpid()}", help="id of this worker")
    parser.add_argument("--required", type=int, default=2, help="gradients in a round")
    parser.add_argument("--steps", type=int, default=40, help="the step to stop at")
    parser.add_argument("--words", type=int, default=50, help="number of different words")
    parser.add_argument("--output", type=Path, help="file for the parameters")
    return parser.parse_args()


def report(told: argparse.Namespace, version: gradserve.Version, num_counted: int) -> None:
    """Says what has become of the parameters, and saves them."""
    counts, is_unwanted = make_messages(told.worker, told.words)
    is_right = (counts @ version["weights"] + version["bias"] > 0) == (is_unwanted > 0)
    print(
        f"{told.worker}: step {version.step}, {num_counted} gradients counted, digest {version.digest}, "
        f"{100 * is_right.mean():.0f} % of the messages are sorted right"
    )
    if told.output:
        told.output.write_bytes(_bytes(version))


def _bytes(version: Mapping[str, np.ndarray]) -> bytes:
    return version["weights"].tobytes() + version["bias"].tobytes()
