"""Records what Flower's server strategies make of some rounds: writes flower.json beside this file.

Runs in an environment of its own, which `make golden` makes so:

    python3 -m venv .venv-golden-flower
    .venv-golden-flower/bin/pip install flwr==1.42.0 numpy==2.4.6
    .venv-golden-flower/bin/python -m tests.parameters.optimizers.make_flower

All clients take part in all rounds: each adds its own delta to the parameters of the server. Strategies get and return
float64.
"""

import json
from pathlib import Path
from typing import Any

import flwr
import numpy as np
from flwr.common import Code, FitRes, Status, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server.strategy import FedAdagrad, FedAdam, FedAvgM, FedYogi

NUM_ROUNDS = 30
INITIAL = [0.5, -1.25, 2.0, 0.0, -0.001]
WEIGHTS = [1, 2, 5]

CASES: list[tuple[Any, str, dict[str, float]]] = [
    (FedAdam, "flower_adam", {"eta": 0.1, "beta_1": 0.9, "beta_2": 0.99, "tau": 1e-9}),
    (FedAdam, "flower_adam", {"eta": 0.03, "beta_1": 0.3, "beta_2": 0.999, "tau": 0.1}),
    (FedYogi, "flower_yogi", {"eta": 0.01, "beta_1": 0.9, "beta_2": 0.99, "tau": 1e-3}),
    (FedAdagrad, "flower_adagrad", {"eta": 0.1, "tau": 1e-3}),
    (FedAvgM, "flower_avg_m", {"server_learning_rate": 0.7, "server_momentum": 0.9}),
    (FedAvgM, "flower_avg_m", {"server_learning_rate": 0.5, "server_momentum": 0.0}),
    (FedAvgM, "flower_avg_m", {"server_learning_rate": 1.0, "server_momentum": 0.0}),
]


def run(strategy: Any, deltas: list[list[list[float]]]) -> list[list[float]]:
    """Returns the parameters after each round."""
    current = np.array(INITIAL)
    history = []
    for index, of_round in enumerate(deltas):
        results = []
        for delta, weight in zip(of_round, WEIGHTS, strict=True):
            parameters = ndarrays_to_parameters([current + np.array(delta)])
            results.append((None, FitRes(Status(Code.OK, ""), parameters, weight, {})))
        aggregated, _ = strategy.aggregate_fit(index + 1, results, [])
        (current,) = parameters_to_ndarrays(aggregated)
        assert current.dtype == np.float64
        history.append(current.tolist())
    return history


def main() -> None:
    rng = np.random.default_rng(1)
    deltas = rng.normal(0, 0.1, (NUM_ROUNDS, len(WEIGHTS), len(INITIAL))).round(3).tolist()
    cases = []
    for strategy, kind, settings in CASES:
        history = run(strategy(initial_parameters=ndarrays_to_parameters([np.array(INITIAL)]), **settings), deltas)
        named: dict[str, Any] = {name.replace("_1", "1").replace("_2", "2"): value for name, value in settings.items()}
        cases.append({"optimizer": named | {"kind": kind}, "history": history})
    recorded = {"flwr": flwr.__version__, "initial": INITIAL, "weights": WEIGHTS, "deltas": deltas, "cases": cases}
    Path(__file__).with_name("flower.json").write_text(json.dumps(recorded) + "\n")


if __name__ == "__main__":
    main()
