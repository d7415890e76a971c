"""A training step of TensorFlow's batch normalization layer, as one graph, in this process."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from benchmarks.peers.driver import Setup, Worker, run_worker
from benchmarks.workloads.batch_norm_layer import DECAY, EPSILON, LayerInputs, StepResult


class LayerWorker(Worker):
    """Computes forward, gradients and updates in a step. The layer updates its moving averages in every training call.

    For FusedBatchNorm, rows become images of one pixel, as in tf.contrib.layers.
    """

    def __init__(self, setup: Setup) -> None:
        tf.config.threading.set_intra_op_parallelism_threads(setup.options["num_threads"])
        self._inputs = inputs = LayerInputs(setup)
        self._layer = layer = tf.keras.layers.BatchNormalization(
            momentum=DECAY,
            epsilon=EPSILON,
            fused=setup.options["fused"],
            beta_initializer=tf.constant_initializer(inputs.beta),
            gamma_initializer=tf.constant_initializer(inputs.gamma),
        )
        self._x, self._dy = tf.constant(inputs.x), tf.constant(inputs.dy)
        self._num_steps = 0
        self._result: Any = None

        def train(x: Any, dy: Any) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(x)
                images = x[:, tf.newaxis, tf.newaxis, :] if x.shape.rank == 2 and layer.fused else x
                y = tf.reshape(layer(images, training=True), tf.shape(x))
                if inputs.activation:
                    y = getattr(tf.nn, inputs.activation)(y)
            return y, *tape.gradient(y, (x, layer.beta, layer.gamma), output_gradients=dy)

        self._train = tf.function(train)

    def step(self) -> None:
        self._result = self._train(self._x, self._dy)
        self._num_steps += 1

    def settle(self) -> None:
        self._result = None

    def check(self) -> None:
        averages = self._layer.moving_mean, self._layer.moving_variance
        result = StepResult(*(tensor.numpy() for tensor in (*self._result, *averages)))
        self._inputs.check(result, self._num_steps, is_fused=self._layer.fused)


if __name__ == "__main__":
    run_worker(LayerWorker, packages=["tensorflow-cpu"])
