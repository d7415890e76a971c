"""`python -m benchmarks.roofline`: the time of a kernel beside the least that this machine allows.

The least is the bytes that the kernel must move, at the bandwidth of a loop that does nothing else on data of the same
size, or its operations at the speed of BLAS on large matrices, or both where one part waits for the other. Limits and
kernels are measured in alternation, so other work on the machine affects both.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.driver import Setup, Worker
from benchmarks.peers.gradserve.batch_norm_kernel import BatchNormWorker
from benchmarks.peers.gradserve.cudnn_rnn import CudnnRnnWorker
from benchmarks.peers.gradserve.gru_block_cell import GRUWorker
from benchmarks.roofline.machine import NUM_THREADS, arithmetic, read_bandwidth, stream_bandwidth
from benchmarks.workloads.cudnn_rnn import LAYERS, NUM_GATES, STEPS, UNITS

_FLOAT_BYTES = 4
_STEPS_PER_REPETITION = 5


@dataclass(frozen=True)
class Roof:
    """A kernel and its limit.

    Attributes:
        title: What is computed.
        worker: Makes the benchmark's worker.
        options: The options of the benchmark's case.
        limit: Returns the least time, in seconds, from what it measures.
        reason: What the limit consists of.
    """

    title: str
    worker: Callable[[Setup], Worker]
    options: dict[str, Any]
    limit: Callable[[], float]
    reason: str


def roofs() -> list[Roof]:
    """Returns the kernels that missed a target at some time."""
    return [_batch_norm((32, 14, 14, 256)), _gru(1024), _lstm(64), _lstm(1)]


def _batch_norm(shape: tuple[int, int, int, int]) -> Roof:
    batch, height, width, channels = shape
    num_bytes = 3 * _FLOAT_BYTES * batch * height * width * channels
    return Roof(
        title=f"FusedBatchNormGrad, NCHW, {list(shape)} as NHWC",
        worker=BatchNormWorker,
        options={"op": "gradient", "data_format": "NCHW", "shape": shape},
        limit=lambda: num_bytes / stream_bandwidth(num_bytes),
        reason=f"reading x and dy once, and writing dx: {num_bytes / 1e6:.1f} MB",
    )


def _gru(cells: int) -> Roof:
    num_bytes = _FLOAT_BYTES * 2 * cells * 3 * cells
    return Roof(
        title=f"GRUBlockCell, batch 1, {cells} inputs, {cells} cells",
        worker=GRUWorker,
        options={"op": "forward", "batch": 1, "inputs": cells, "cells": cells},
        limit=lambda: num_bytes / read_bandwidth(num_bytes),
        reason=f"reading the weights: {num_bytes / 1e6:.1f} MB",
    )


def _lstm(batch: int) -> Roof:
    """The products of 6 matrices: with W and R forward, and with both and for the gradients of both backward."""
    weights = NUM_GATES["lstm"] * UNITS * UNITS
    operations_of_all = 6 * 2 * LAYERS * STEPS * batch * weights
    by_step = _FLOAT_BYTES * weights
    if batch > 1:
        operations, num_reads = operations_of_all, 0
        reason = f"{operations / 1e9:.1f} billion operations"
    else:
        operations, num_reads = operations_of_all * 4 // 6, 2 * LAYERS * STEPS
        reason = (
            f"reading R for every step, {num_reads} times {by_step / 1e6:.1f} MB, and the other products, "
            f"{operations / 1e9:.1f} billion operations"
        )

    def limit() -> float:
        reading = num_reads * by_step / read_bandwidth(by_step) if num_reads else 0
        return reading + operations / arithmetic()

    return Roof(
        title=f"CudnnRNN and Backprop, lstm, batch {batch}",
        worker=CudnnRnnWorker,
        options={"mode": "lstm", "batch": batch},
        limit=limit,
        reason=reason,
    )


def measure(roof: Roof, repeats: int) -> str:
    """Returns a line of the table."""
    setup = Setup(0, 1, {**roof.options, "num_threads": NUM_THREADS}, {}, Path())
    worker = roof.worker(setup)
    worker.step()
    worker.check()
    worker.settle()
    limits, times = [], []
    for _ in range(repeats):
        limits.append(roof.limit())
        for _ in range(_STEPS_PER_REPETITION):
            began = time.perf_counter()
            worker.step()
            times.append(time.perf_counter() - began)
            worker.settle()
    limit, seconds = statistics.median(limits), statistics.median(times)
    return f"| {roof.title} | {roof.reason} | {limit * 1e3:.2f} | {seconds * 1e3:.2f} | {limit / seconds:.0%} |"


def main() -> None:
    """Prints a table in Markdown."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.roofline", description=__doc__)
    parser.add_argument("--repeats", type=int, default=10, help="repetitions of each measurement (default: 10)")
    arguments = parser.parse_args()
    print("| kernel | what it cannot do without | limit, ms | kernel, ms | of the limit |\n|---|---|---|---|---|")
    for roof in roofs():
        print(measure(roof, arguments.repeats), flush=True)


if __name__ == "__main__":
    main()
