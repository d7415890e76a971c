"""GRUBlockCell by TensorFlow's raw ops, eagerly, in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from benchmarks.peers.driver import Setup, Worker, run_worker
from benchmarks.workloads.gru_block_cell import GRUInputs


class GRUWorker(Worker):
    """Makes one call per step."""

    def __init__(self, setup: Setup) -> None:
        tf.config.threading.set_intra_op_parallelism_threads(setup.options["num_threads"])
        self._inputs = inputs = GRUInputs(setup)
        self._result: Any = None
        arrays = inputs.gradient if inputs.is_gradient else inputs.cell
        tensors = {name: tf.constant(array) for name, array in arrays.items()}
        op: Any = tf.raw_ops.GRUBlockCellGrad if inputs.is_gradient else tf.raw_ops.GRUBlockCell
        self._op: Callable[[], Any] = lambda: op(**tensors)

    def step(self) -> None:
        self._result = self._op()

    def settle(self) -> None:
        self._result = None

    def check(self) -> None:
        output = self._result.d_h_prev if self._inputs.is_gradient else self._result.h
        self._inputs.check(output.numpy())


if __name__ == "__main__":
    run_worker(GRUWorker, packages=["tensorflow-cpu"])
