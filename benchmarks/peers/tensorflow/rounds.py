"""A worker of a round: it applies its gradient; worker 0 then takes the average.

With `one_run` worker 0 does both in one `session.run`, the take after the apply.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks.peers.driver import Setup, Worker, run_worker
from benchmarks.peers.tensorflow.cluster import PARAMETER_SERVER, local_gradient, start_session, worker_device


class RoundWorker(Worker):
    """Applies a local variable, and takes an array in its own process."""

    def __init__(self, setup: Setup) -> None:
        self._expected = (setup.num_workers + 1) / 2
        self._taker = setup.rank == 0
        one_run = self._taker and setup.options["one_run"]
        self._local_step = 0
        self._average: Any = None
        with tf.Graph().as_default():
            shape = (setup.num_floats,)
            gradient = local_gradient(setup, shape, "gradient")
            local_step = tf.compat.v1.placeholder(tf.int64, ())
            with tf.device(PARAMETER_SERVER):
                accumulator = tf.compat.v1.ConditionalAccumulator(tf.float32, shape, shared_name="accumulator")
                apply = accumulator.apply_grad(gradient, local_step)
                with tf.control_dependencies([apply] if one_run else []):
                    average = accumulator.take_grad(setup.num_workers)
            with tf.device(worker_device(setup)):
                arrived = tf.identity(average)
            session = start_session(setup)
            self._apply = session.make_callable(arrived if one_run else apply, feed_list=[local_step])
            self._take = session.make_callable(arrived) if self._taker and not one_run else None

    def step(self) -> None:
        self._average = self._apply(self._local_step)
        if self._take is not None:
            self._average = self._take()

    def settle(self) -> None:
        self._local_step += 1
        self._average = None

    def check(self) -> None:
        if self._taker:
            assert np.all(self._average == self._expected), "wrong average"


if __name__ == "__main__":
    tf.compat.v1.disable_eager_execution()
    run_worker(RoundWorker, packages=["tensorflow-cpu"])
