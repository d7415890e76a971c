"""A worker that averages a ResNet-50's gradients with 161 accumulators; each call is one `session.run`.

With `everybody_reads` the chief takes the averages into variables on the parameter server and puts one token per worker
into a queue there; each worker takes a token and reads the variables, as in synchronous training with a parameter
server. Otherwise only the chief gets the averages, straight from the accumulators.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks.peers.driver import Setup, Worker, run_worker
from benchmarks.peers.tensorflow.cluster import PARAMETER_SERVER, local_gradient, start_session, worker_device
from benchmarks.workloads.resnet50 import parameter_shapes


class ResNetWorker(Worker):
    """Applies local variables, and reads arrays in its own process."""

    def __init__(self, setup: Setup) -> None:
        self._expected = (setup.num_workers + 1) / 2
        self._local_step = 0
        self._averages: list[np.ndarray[Any, np.dtype[np.float32]]] = []
        with tf.Graph().as_default():
            local_step = tf.compat.v1.placeholder(tf.int64, ())
            accumulators = _accumulators()
            gradients = [
                local_gradient(setup, shape, f"gradient{i}") for i, shape in enumerate(parameter_shapes().values())
            ]
            with tf.device(PARAMETER_SERVER):
                apply = tf.group(*(a.apply_grad(g, local_step) for a, g in zip(accumulators, gradients, strict=True)))
                averages = [a.take_grad(setup.num_workers) for a in accumulators]
            steps = (
                _everybody_reads(setup, averages) if setup.options["everybody_reads"] else _chief_reads(setup, averages)
            )
            session = start_session(setup)
            self._apply = session.make_callable(apply, feed_list=[local_step])
            self._then: list[Callable[[], Any]] = [session.make_callable(fetches) for fetches in steps]

    def step(self) -> None:
        self._apply(self._local_step)
        for call in self._then:
            self._averages = call()

    def settle(self) -> None:
        self._local_step += 1
        self._averages = []

    def check(self) -> None:
        if self._then:
            assert len(self._averages) == len(parameter_shapes())
            assert all(np.all(average == self._expected) for average in self._averages), "wrong average"


def _accumulators() -> list[tf.compat.v1.ConditionalAccumulator]:
    with tf.device(PARAMETER_SERVER):
        return [
            tf.compat.v1.ConditionalAccumulator(tf.float32, shape, shared_name=name)
            for name, shape in parameter_shapes().items()
        ]


def _chief_reads(setup: Setup, averages: list[tf.Tensor]) -> list[Any]:
    if setup.rank != 0:
        return []
    with tf.device(worker_device(setup)):
        return [[tf.identity(average) for average in averages]]


def _everybody_reads(setup: Setup, averages: list[tf.Tensor]) -> list[Any]:
    with tf.device(PARAMETER_SERVER):
        tokens = tf.queue.FIFOQueue(setup.num_workers, [tf.int64], [()], shared_name="tokens")
        published = [
            tf.compat.v1.get_variable(
                f"average{i}",
                initializer=tf.zeros(shape),
                collections=[tf.compat.v1.GraphKeys.LOCAL_VARIABLES],
                use_resource=True,
            )
            for i, shape in enumerate(parameter_shapes().values())
        ]
        stores = [variable.assign(average) for variable, average in zip(published, averages, strict=True)]
        with tf.control_dependencies(stores):
            publish = tokens.enqueue_many(tf.zeros([setup.num_workers], tf.int64))
        with tf.control_dependencies([tokens.dequeue()]):
            current = [variable.read_value() for variable in published]
    with tf.device(worker_device(setup)):
        read = [tf.identity(value) for value in current]
    return [publish, read] if setup.rank == 0 else [read]


if __name__ == "__main__":
    tf.compat.v1.disable_eager_execution()
    run_worker(ResNetWorker, packages=["tensorflow-cpu"])
