"""A program with a client that it never closes, and one of everything that a client can have for itself alone.

Run as `python -m tests.resources.program ADDRESS THEN`.
"""

import sys
import time
from typing import Any

import numpy as np

import gradserve

NUM_MADE = 6


def make_all(client: gradserve.Client) -> list[Any]:
    return [
        client.conditional_accumulator("float32", (2,)),
        client.sparse_conditional_accumulator("float32"),
        client.gradient_accumulator({"w": np.ones(2)}),
        client.raw_ops.ConditionalAccumulator(dtype="float32", shape=None),
        client.batch_norm(),
        client.batch_norm(input_shape=(None, 3), dtype="float32"),
    ]


def main(address: str, then: str) -> None:
    client = gradserve.connect(address)
    made = make_all(client)
    sys.stdout.write("made\n")
    sys.stdout.flush()
    match then:
        case "sleep":
            time.sleep(1000)
        case "wait":
            made[0].take_grad(1, timeout=1000)
        case "ask":
            sys.stdin.readline()
            sys.stdout.write(str(made[0].info()))
        case "end":
            pass


if __name__ == "__main__":
    main(*sys.argv[1:])
