"""A training step of the batch normalization layer by gradserve's computation, without a server, in this process."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.peers.driver import Setup, Worker, run_worker
from benchmarks.workloads.batch_norm_layer import DECAY, EPSILON, LayerInputs, StepResult
from gradserve_protocol.memory.pool import BufferPool
from gradserve_server.devices.device import CpuDevice
from gradserve_server.devices.host.kernels import ForkJoin
from gradserve_server.layers.batch_norm.computation import (
    BACKWARD,
    FORWARD,
    UPDATE,
    UpdateAttributes,
    UpdateInputs,
    make_layer_families,
)
from gradserve_server.layers.batch_norm.config import BatchNormConfig
from gradserve_server.layers.batch_norm.spec import (
    BackwardAttributes,
    BackwardInputs,
    ForwardAttributes,
    ForwardInputs,
    Implementation,
)
from gradserve_server.ops.activation.spec import FAMILY as ACTIVATION
from gradserve_server.ops.batch_norm.spec import FAMILY as BATCH_NORM
from gradserve_server.ops.operation import AttributesT, InputsT, Op, OutputsT, PlanT
from gradserve_server.ops.registry import make_families
from gradserve_server.runtime.process import keep_freed_memory


class LayerWorker(Worker):
    """Computes forward, gradients and updates in a step, with outputs from the pool, as in the server."""

    def __init__(self, setup: Setup) -> None:
        keep_freed_memory()
        device = CpuDevice(BufferPool(1 << 30))
        ops = make_families(device, ForkJoin(setup.options["num_threads"]))
        for name in (BATCH_NORM, ACTIVATION):
            ops[name].prepare(lambda: False)
        self._families = make_layer_families(device, ops)
        self._inputs = inputs = LayerInputs(setup)
        self._config = BatchNormConfig(decay=DECAY, scale=True, epsilon=EPSILON, activation_fn=inputs.activation)
        channels = inputs.beta.size
        self._averages: Any = (np.zeros(channels, np.float32), np.ones(channels, np.float32))
        implementation = Implementation.FUSED if inputs.x.ndim == 2 else Implementation.CORE_FUSED
        self._attributes = BackwardAttributes(self._config, True, implementation)
        self._num_steps = 0
        self._result: StepResult | None = None

    def step(self) -> None:
        given, (mean, variance) = self._inputs, self._averages
        variables: Any = {"beta": given.beta, "gamma": given.gamma}
        forward = self._run(
            FORWARD,
            ForwardInputs(given.x, **variables, moving_mean=mean, moving_variance=variance),
            ForwardAttributes(self._config),
        )
        gradients = self._run(
            BACKWARD,
            BackwardInputs(
                given.dy,
                given.x,
                forward.mean,
                forward.variance,
                **variables,
                activation_saved=forward.activation_saved,
            ),
            self._attributes,
        )
        update = UpdateInputs(
            moving_mean=mean,
            moving_variance=variance,
            batch_mean=forward.batch_mean,
            batch_variance=forward.batch_variance,
        )
        updated = self._run(UPDATE, update, UpdateAttributes(self._config, self._attributes.implementation))
        self._averages = updated.moving_mean, updated.moving_variance
        self._num_steps += 1
        self._result = StepResult(
            forward.outputs,
            gradients.inputs_gradient,
            gradients.beta_gradient,
            gradients.gamma_gradient,
            *self._averages,
        )

    def settle(self) -> None:
        self._result = None

    def check(self) -> None:
        assert self._result is not None
        self._inputs.check(self._result, self._num_steps)

    def _run(self, op: Op[InputsT, AttributesT, OutputsT, PlanT], inputs: InputsT, attributes: AttributesT) -> OutputsT:
        return op.compute(self._families[op.family], inputs, attributes, op.plan(inputs, attributes))


if __name__ == "__main__":
    run_worker(LayerWorker, packages=["gradserve", "numba", "numpy"])
