"""Thirty rounds of parameters of every dtype, and what they end with, to the bit.

python -m tests.parameters.bits

Prints the digests with compiled kernels, for the processor that Numba is told of.
"""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import ml_dtypes
import numpy as np

from gradserve_server.devices.host.kernels import ForkJoin
from gradserve_server.devices.host.reduction import Reducer
from gradserve_server.parameters.optimizers.adam import Adam
from gradserve_server.parameters.optimizers.optimizer import Optimizer, Schedule, ScheduleKind
from gradserve_server.parameters.optimizers.sgd import Sgd
from gradserve_server.parameters.optimizers.stepping import Stepper
from gradserve_server.parameters.optimizers.yogi import Yogi
from gradserve_server.parameters.parameters import Parameters
from tests.parameters.bench import KEY, ParametersBench, push

ROUNDS = 30
WORKERS = 3
SCHEDULE = Schedule(ScheduleKind.COSINE, warmup=5, rounds=20, end=0.1)
OPTIMIZERS: dict[str, Optimizer] = {
    "momentum": Sgd(0.7, 0.9, 0.0, 0.01, nesterov=True),
    "adam": Adam(0.01, 0.9, 0.999, 1e-8, weight_decay=0.01, decoupled=True),
    "yogi": Yogi(0.01, 0.9, 0.999, 1e-3, 1e-6),
}
SHAPES: dict[str, tuple[tuple[int, ...], Any]] = {
    "float32": ((70, 1001), np.float32),
    "bfloat16": ((33_333,), ml_dtypes.bfloat16),
    "float64": ((17, 19, 23), np.float64),
    "float16": ((9_999,), np.float16),
    "scalar": ((), np.float32),
}
CHUNK = 1 << 12
"""The elements that a thread computes at a time, so that all of them have some."""


def arithmetic(num_threads: int, *, is_compiled: bool) -> tuple[Reducer, Stepper]:
    """Returns what computes the rounds."""
    parallel = ForkJoin(num_threads)
    reducer = Reducer(parallel, shared_bytes=CHUNK, chunk_elements=CHUNK)
    stepper = Stepper(parallel, chunk_elements=CHUNK)
    if is_compiled:
        for each in (reducer, stepper):
            each.prepare(lambda: False)
            assert all(each._kernels.get(np.dtype(dtype)) is not None for dtype in (np.float32, np.float64))
    return reducer, stepper


def values(seed: list[int], scale: float) -> dict[str, np.ndarray]:
    """Returns values of all dtypes, of many magnitudes."""
    rng = np.random.default_rng(seed)
    return {
        name: np.asarray(rng.standard_normal(shape) * scale * 10.0 ** rng.integers(-3, 1, shape)).astype(dtype)
        for name, (shape, dtype) in SHAPES.items()
    }


async def run(
    open_parameters: Callable[..., Awaitable[Parameters]],
    optimizer: Optimizer,
    between: Callable[[Parameters, int], Awaitable[Parameters]] | None = None,
) -> str:
    """Runs all rounds; returns the digest of the last version.

    Args:
        open_parameters: Makes the parameters.
        optimizer: Their optimizer.
        between: Called after each update, with the number of updates so far; returns the parameters to go on with.
    """
    first = values([0], 1.0)
    parameters = await open_parameters(first, optimizer=optimizer, schedule=SCHEDULE, rounds={"num_required": WORKERS})
    for number in range(ROUNDS * WORKERS):
        step, worker = divmod(number, WORKERS)
        update = values([1, step, worker], 0.1)
        if (step + worker) % 4 == 0:
            del update["bfloat16"]
        await push(parameters, update, step, weight=1.0 + worker / 3, worker_id=f"worker {worker}")
        if between is not None:
            parameters = await between(parameters, number + 1)
    assert parameters.state.step == ROUNDS
    return parameters.state.digest.hex()


def digests(num_threads: int, *, is_compiled: bool) -> dict[str, str]:
    """Returns the digest with each optimizer."""
    bench = ParametersBench(arithmetic=arithmetic(num_threads, is_compiled=is_compiled))

    async def all_runs() -> dict[str, str]:
        found = {}
        for name, optimizer in OPTIMIZERS.items():
            found[name] = await run(bench.parameters, optimizer)
            bench.registry.delete(KEY)
        return found

    return asyncio.run(all_runs())


if __name__ == "__main__":
    sys.stdout.write(json.dumps(digests(1, is_compiled=True)))
