"""A worker of synchronous training with a parameter server, as TensorFlow's SyncReplicasOptimizer does it.

Each worker applies its gradient to an accumulator. The chief lets the parameter server take the average and step the
variable with momentum, and puts one token for each worker into a queue there; each worker takes a token, and reads the
variable.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks.peers.driver import Setup, Worker, run_worker
from benchmarks.peers.tensorflow.cluster import PARAMETER_SERVER, local_gradient, start_session, worker_device
from benchmarks.workloads.steps import LEARNING_RATE, MOMENTUM, expected_value


class ParametersWorker(Worker):
    """Applies a local variable, and reads an array in its own process."""

    def __init__(self, setup: Setup) -> None:
        self._num_workers = setup.num_workers
        self._step = 0
        self._values: Any = None
        with tf.Graph().as_default():
            shape = (setup.num_floats,)
            gradient = local_gradient(setup, shape, "gradient")
            local_step = tf.compat.v1.placeholder(tf.int64, ())
            with tf.device(PARAMETER_SERVER):
                accumulator = tf.compat.v1.ConditionalAccumulator(tf.float32, shape, shared_name="accumulator")
                apply = accumulator.apply_grad(gradient, local_step)
                parameters, slot = (self._variable(name, shape) for name in ("parameters", "momentum"))
                tokens = tf.queue.FIFOQueue(setup.num_workers, [tf.int64], [()], shared_name="tokens")
                stepped = tf.raw_ops.ResourceApplyMomentum(
                    var=parameters.handle,
                    accum=slot.handle,
                    lr=LEARNING_RATE,
                    grad=accumulator.take_grad(setup.num_workers),
                    momentum=MOMENTUM,
                )
                with tf.control_dependencies([stepped]):
                    publish = tokens.enqueue_many(tf.zeros([setup.num_workers], tf.int64))
                with tf.control_dependencies([tokens.dequeue()]):
                    current = parameters.read_value()
            with tf.device(worker_device(setup)):
                arrived = tf.identity(current)
            session = start_session(setup)
            self._apply = session.make_callable(apply, feed_list=[local_step])
            calls = [publish, arrived] if setup.rank == 0 else [arrived]
            self._then: list[Callable[[], Any]] = [session.make_callable(each) for each in calls]

    def step(self) -> None:
        self._apply(self._step)
        for call in self._then:
            self._values = call()

    def settle(self) -> None:
        self._step += 1
        self._values = None

    def check(self) -> None:
        expected = expected_value("momentum", (self._num_workers + 1) / 2, self._step + 1)
        assert np.allclose(self._values, expected, rtol=1e-5), "wrong parameters"

    @staticmethod
    def _variable(name: str, shape: tuple[int, ...]) -> Any:
        """Returns a variable of zeros that all workers share."""
        return tf.compat.v1.get_variable(
            name,
            initializer=tf.zeros(shape),
            collections=[tf.compat.v1.GraphKeys.LOCAL_VARIABLES],
            use_resource=True,
        )


if __name__ == "__main__":
    tf.compat.v1.disable_eager_execution()
    run_worker(ParametersWorker, packages=["tensorflow-cpu"])
