"""One of three workers that fit a line, and which may be a bad one: slow, with another learning rate, or with a NaN.

docs/howto/find_a_bad_worker.md finds it. From the top folder of a checkout, with a server running (`make serve`), in
three terminals; `rate` and `nan` are the other troubles:

    pip install .
    python examples/bad_worker.py localhost:50051
    python examples/bad_worker.py localhost:50051 worker-1
    python examples/bad_worker.py localhost:50051 worker-2 slow
"""

import sys
import time
import zlib

import numpy as np

import gradserve
from gradserve.training import State, Worker

NUM_WORKERS = 3
NUM_STEPS = 2000


def main(address: str, name: str = "worker-0", trouble: str = "") -> None:
    """Trains with the other workers, on data of its own, until it is stopped or its trouble ends it."""
    rate = 0.5 if trouble == "rate" else 0.1
    settings = {"numpy": {"optimizer": f"SGD, learning rate {rate}"}}
    random = np.random.default_rng(zlib.crc32(name.encode()))
    x = random.uniform(-1, 1, 1000)
    y = 3 * x - 1 + random.normal(0, 0.1, 1000)
    line: dict[str, np.ndarray] = {"slope": np.zeros(()), "intercept": np.zeros(())}

    with (
        gradserve.connect(address, timeout=600) as client,
        Worker(client, line, name="line", num_required=NUM_WORKERS, worker_id=name, settings=settings) as worker,
    ):
        state = worker.begin(lambda: State(line))
        if state is not None:
            line = {key: np.asarray(value) for key, value in state.tensors.items()}
        while worker.step < NUM_STEPS:
            if trouble == "nan" and worker.step >= 20:
                x[0] = np.nan  # a bad row in the data
            error = line["slope"] * x + line["intercept"] - y
            gradient = {"slope": np.mean(2 * error * x), "intercept": np.mean(2 * error)}
            time.sleep(0.4 if trouble == "slow" else 0.05)  # a larger model would take as long
            advance = worker.exchange(gradient)
            if advance.state is not None:
                line = {key: np.asarray(value) for key, value in advance.state.tensors.items()}
            for average in advance.averages:
                line = {key: line[key] - rate * average[key] for key in line}


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3, 4) or sys.argv[3:] not in ([], ["slow"], ["rate"], ["nan"]):
        sys.exit(__doc__)
    main(*sys.argv[1:])
