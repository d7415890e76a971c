"""Clients with uneven data come for one round each, and teach one model to read digits: FedAvg, FedAdam or FedBuff.

From the top folder of a checkout, with a server running (`make serve`):

    pip install . scikit-learn
    python examples/federated_digits.py localhost:50051

Of 30 clients, one has a few digits and another hundreds, and each has mostly digits of a few kinds. A client that comes
finds the parameters by their name, trains on its own data, pushes what has changed and what it has measured, and
leaves; the server keeps nothing of it but the record of its round. An evaluator reads each version beside them, from
the first one on, and reports how many digits of a test it reads.

`--algorithm fedavg`, the default, ends a round with five clients, and the next version is the mean of theirs, weighted
by the number of their digits. `fedadam` hands the same mean to Adam on the server. `fedbuff` waits for nobody: six
clients are under way at all times, three updates make a version, and those that come late count less.
"""

import argparse
import uuid
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits

import gradserve

NUM_CLIENTS, NUM_AT_ONCE = 30, 6
NUM_TRAINED = 1400
NUM_HIDDEN = 32
EPOCHS, BATCH, LEARNING_RATE = 2, 16, 0.2

ALGORITHMS: dict[str, dict[str, Any]] = {
    "fedavg": {"num_required": 5},
    "fedadam": {"num_required": 5, "optimizer": gradserve.optim.flower.FedAdam(eta=0.02, tau=1e-3)},
    "fedbuff": {"num_required": 3, "max_staleness": 10, "staleness": "inverse_sqrt", "normalize": "count"},
}
"""The algorithms, as properties of the parameters."""

Model = dict[str, NDArray[np.float32]]


class Data(NamedTuple):
    """Images of 64 pixels, and the digits that they show."""

    images: NDArray[np.float32]
    digits: NDArray[np.int64]


def divided(chance: np.random.Generator) -> tuple[list[Data], Data]:
    """Returns the data of each client, of uneven sizes and kinds, and the digits of the test."""
    images, digits = load_digits(return_X_y=True)
    order = chance.permutation(len(digits))
    images, digits = images[order].astype(np.float32) / 16, digits[order]
    owners = np.empty(NUM_TRAINED, int)
    for kind in range(10):
        (of_kind,) = np.nonzero(digits[:NUM_TRAINED] == kind)
        owners[of_kind] = chance.choice(NUM_CLIENTS, len(of_kind), p=chance.dirichlet(np.full(NUM_CLIENTS, 0.3)))
    owned = [np.flatnonzero(owners == each) for each in range(NUM_CLIENTS)]
    clients = [Data(images[each], digits[each]) for each in owned if len(each)]
    return clients, Data(images[NUM_TRAINED:], digits[NUM_TRAINED:])


def created(chance: np.random.Generator) -> Model:
    """Returns a network with a hidden layer, which has learned nothing yet."""
    return {
        "hidden": chance.normal(0, 0.2, (64, NUM_HIDDEN)).astype(np.float32),
        "bias": np.zeros(NUM_HIDDEN, np.float32),
        "output": chance.normal(0, 0.2, (NUM_HIDDEN, 10)).astype(np.float32),
    }


def gradients(model: Model, data: Data) -> tuple[Model, float, float]:
    """Returns the gradients of the mean loss, the loss, and the part of the digits that are read right."""
    hidden = np.maximum(data.images @ model["hidden"] + model["bias"], 0)
    scores = hidden @ model["output"]
    chances = np.exp(scores - scores.max(axis=1, keepdims=True))
    chances /= chances.sum(axis=1, keepdims=True)
    rows = np.arange(len(data.digits))
    loss = float(-np.log(chances[rows, data.digits] + 1e-12).mean())
    accuracy = float((scores.argmax(axis=1) == data.digits).mean())
    chances[rows, data.digits] -= 1
    back = (chances / len(rows)) @ model["output"].T * (hidden > 0)
    found = {"hidden": data.images.T @ back, "bias": back.sum(axis=0), "output": hidden.T @ chances / len(rows)}
    return found, loss, accuracy


def take_part(address: str, name: str, rank: int, data: Data, *, counts_alike: bool) -> None:
    """Comes as a client for one round."""
    chance = np.random.default_rng(rank)
    with gradserve.connect(address, timeout=60) as client:
        parameters = client.parameters(shared_name=name)
        version = parameters.read()
        local = {each: value.copy() for each, value in version.items()}
        _, loss, accuracy = gradients(local, data)
        for _ in range(EPOCHS):
            for batch in np.array_split(chance.permutation(len(data.digits)), -(-len(data.digits) // BATCH)):
                found, _, _ = gradients(local, Data(data.images[batch], data.digits[batch]))
                for each in local:
                    local[each] -= LEARNING_RATE * found[each]
        parameters.push(
            {each: local[each] - version[each] for each in local},
            version,
            weight=1.0 if counts_alike else float(len(data.digits)),
            worker_id=f"client-{rank}",
            metrics={"loss": loss, "accuracy": accuracy},
        )


def main() -> None:
    """Runs the rounds, and prints what clients and evaluator have measured."""
    parser = argparse.ArgumentParser(description="Federated rounds over uneven data.")
    parser.add_argument("address", metavar="HOST:PORT", help="the server")
    parser.add_argument("--algorithm", choices=ALGORITHMS, default="fedavg")
    parser.add_argument("--rounds", type=int, default=30, help="default: 30")
    options = parser.parse_args()

    chance = np.random.default_rng(1)
    clients, test = divided(chance)
    name = f"{options.algorithm}-{uuid.uuid4()}"
    how, is_buffered = ALGORITHMS[options.algorithm], options.algorithm == "fedbuff"
    with gradserve.connect(options.address, timeout=60) as client, ThreadPoolExecutor(NUM_AT_ONCE + 1) as threads:
        parameters = client.parameters(created(chance), shared_name=name, keep_versions=10, **how)

        def measure(version: gradserve.Version) -> dict[str, float]:
            _, loss, accuracy = gradients(dict(version), test)
            return {"loss": loss, "accuracy": accuracy}

        evaluator = threads.submit(parameters.evaluate, measure, until=options.rounds)

        def come() -> Any:
            rank = int(chance.integers(len(clients)))
            return threads.submit(take_part, options.address, name, rank, clients[rank], counts_alike=is_buffered)

        under_way = {come() for _ in range(NUM_AT_ONCE if is_buffered else how["num_required"])}
        while parameters.info().step < options.rounds:
            ended, under_way = wait(under_way, return_when=FIRST_COMPLETED)
            for each in ended:
                each.result()  # raises what went wrong
                under_way.add(come())
        wait(under_way)
        evaluator.result()
        report(parameters, options.rounds)
        parameters.delete()


def report(parameters: gradserve.Parameters, rounds: int) -> None:
    """Prints a line for each version: who made it, and how good it is."""
    by_step = {each.step: each for each in parameters.rounds()}
    for evaluation in parameters.evaluations():
        line = f"step {evaluation.step}: {evaluation.metrics['accuracy']:.1%} of the test digits"
        if (record := by_step.get(evaluation.step)) is not None:
            staleness = max(each.staleness for each in record.updates)
            line += f", {len(record.updates)} clients, whose loss was {record.metrics['loss']:.3f}"
            line += f", up to {staleness} versions late" if staleness else ""
        print(line)
    weights = parameters.info().weights
    print(f"{rounds} rounds of weight {weights.applied:g}; dropped: {dict(weights.refused) or 'nothing'}")


if __name__ == "__main__":
    main()
