"""Batch normalisation by TensorFlow's raw ops, eagerly, in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from benchmarks.peers.driver import Setup, Worker, run_worker
from benchmarks.workloads.batch_norm import EPSILON, BatchNormInputs


class BatchNormWorker(Worker):
    """Makes one call per step."""

    def __init__(self, setup: Setup) -> None:
        tf.config.threading.set_intra_op_parallelism_threads(setup.options["num_threads"])
        self._inputs = inputs = BatchNormInputs(setup)
        self._result: Any = None
        self._op: Callable[[], Any]
        common = {"epsilon": EPSILON, "data_format": inputs.data_format, "is_training": True}
        x, scale = tf.constant(inputs.x), tf.constant(inputs.scale)
        if inputs.is_gradient:
            moments = [tf.constant(inputs.mean), tf.constant(inputs.variance), tf.constant(0.0)]
            dy = tf.constant(inputs.y_backprop)
            reserve = dict(zip(("reserve_space_1", "reserve_space_2", "reserve_space_3"), moments, strict=True))
            self._op = lambda: tf.raw_ops.FusedBatchNormGradV3(y_backprop=dy, x=x, scale=scale, **reserve, **common)
        else:
            offset, nothing = tf.constant(inputs.offset), tf.constant([], tf.float32)
            self._op = lambda: tf.raw_ops.FusedBatchNormV3(
                x=x, scale=scale, offset=offset, mean=nothing, variance=nothing, **common
            )

    def step(self) -> None:
        self._result = self._op()

    def settle(self) -> None:
        self._result = None

    def check(self) -> None:
        self._inputs.check(self._result[0].numpy())


if __name__ == "__main__":
    run_worker(BatchNormWorker, packages=["tensorflow-cpu"])
