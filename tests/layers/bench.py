"""Layers for tests: no socket, no thread, a clock of our own."""

import asyncio
import itertools
from collections.abc import Callable, Collection, Mapping
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from gradserve_protocol.memory.pool import BufferPool
from gradserve_server.devices.compute import InlineCompute
from gradserve_server.devices.device import CpuDevice, Device
from gradserve_server.devices.host.kernels import ForkJoin
from gradserve_server.devices.host.loading import KernelLoader
from gradserve_server.layers.batch_norm.computation import make_layer_families
from gradserve_server.layers.batch_norm.config import BatchNormConfig
from gradserve_server.layers.batch_norm.events import Event
from gradserve_server.layers.batch_norm.forwards import REMEMBERED_FORWARDS, Forward
from gradserve_server.layers.batch_norm.journal import LayerJournals
from gradserve_server.layers.batch_norm.layer import (
    BatchNormLayer,
    ForwardCall,
    ForwardResult,
    LayerEnvironment,
)
from gradserve_server.layers.batch_norm.registry import LayerRegistry, Reuse
from gradserve_server.layers.batch_norm.spec import BackwardOutputs, CallInputs
from gradserve_server.layers.variables import Regularizer, TensorInitializer
from gradserve_server.ops.operation import Family
from gradserve_server.ops.registry import make_families
from gradserve_server.ops.runner import OpRunner
from gradserve_server.resources.budget import Budget
from gradserve_server.resources.lifetimes import Lifetimes
from gradserve_server.resources.memory import Memory
from gradserve_server.resources.registry import ResourceKey
from gradserve_server.security.identity import ShareRules
from tests.journals import EventJournal, OneJournal

KEY = ResourceKey("test", "layer")


class LayerBench:
    """A registry with all that it needs, to be looked at. NumPy computes: kernels are not prepared."""

    def __init__(
        self,
        limit: int = 1 << 40,
        device: Device | None = None,
        families: Mapping[str, Family] | None = None,
        journal: EventJournal[Event] | None = None,
        remembered: int = REMEMBERED_FORWARDS,
        max_layers: int = 1 << 20,
        journals: LayerJournals | None = None,
        memory: Budget | None = None,
        handles: Budget | None = None,
        clock: Callable[[], float] | None = None,
        lifetimes: Lifetimes | None = None,
    ) -> None:
        """Takes `families` of ops and layers together with their device; without, the CPU's."""
        self.now = 0.0
        clock = clock or (lambda: self.now)
        self.memory = memory or Budget(limit, "bytes of tensor memory", ShareRules())
        self.handles = handles or Budget(1 << 20, "tensor handles")
        self._device = device or CpuDevice(BufferPool(0))
        if families is None:
            ops = make_families(self._device, ForkJoin(1))
            families = {**ops, **make_layer_families(self._device, ops)}
        self.runner = OpRunner(
            device=self._device,
            families=families,
            compute=InlineCompute(),
            memory=Memory(self.memory),
            loader=KernelLoader(),
        )
        ids = itertools.count(1)
        self.lifetimes = lifetimes or Lifetimes(clock, 60.0)
        self.environment = LayerEnvironment(
            runner=self.runner,
            compute=InlineCompute(),
            memory=Memory(self.memory),
            handles=self.handles,
            clock=clock,
            new_id=lambda: str(next(ids)),
            new_seed=lambda: 7,
            journals=journals if journal is None else cast(LayerJournals, OneJournal(journal)),
            remembered=remembered,
        )
        self.bookkeeping = Budget(1 << 40, "bytes of bookkeeping")
        self.registry = LayerRegistry(self.environment, Budget(max_layers, "layers"), self.lifetimes, self.bookkeeping)

    def layer(self, key: ResourceKey = KEY, reuse: Reuse = Reuse.ALLOWED, **arguments: Any) -> BatchNormLayer:
        """Returns a layer with the arguments of `client.batch_norm`, as the golden cases have them."""
        return self.registry.create(key, config_of(**arguments), reuse, "")[0]

    def expire(self) -> int:
        """Forgets forwards whose lease has run out; returns how many."""
        return asyncio.run(self.registry.expire())

    def variables(self, layer: BatchNormLayer, names: Collection[str] = ()) -> dict[str, NDArray[Any]]:
        """Returns variables in host memory, all if none are named."""
        device = self._device
        with device.computing():
            return {
                name: device.to_host(array) if device.holds(array) else array
                for name, array in layer.get_variables(names).items()
            }


def config_of(**arguments: Any) -> BatchNormConfig:
    given = dict(arguments)
    if "updates_collections" in given:
        updates = given.pop("updates_collections")
        given["in_place_updates"] = updates is None
        given["updates_collections"] = () if updates is None else (updates,)
    given["activation_fn"] = given.get("activation_fn") or ""
    initializers = given.pop("param_initializers", None) or {}
    given["param_initializers"] = {
        name: TensorInitializer(value) if isinstance(value, np.ndarray) else value
        for name, value in initializers.items()
    }
    regularizers = given.pop("param_regularizers", None) or {}
    given["param_regularizers"] = {name: _regularizer(value) for name, value in regularizers.items()}
    given["renorm_clipping"] = given.get("renorm_clipping") or {}
    return BatchNormConfig(**given)


def _regularizer(value: Any) -> Regularizer:
    return value if isinstance(value, Regularizer) else Regularizer(*value["regularizer"])


def forward(
    layer: BatchNormLayer,
    x: Any,
    is_training: bool = True,
    batch_weights: Any = None,
    adjustment: Any = None,
    **call: Any,
) -> ForwardResult:
    scale, bias = adjustment or (None, None)
    inputs = CallInputs(np.asarray(x), batch_weights, scale, bias)
    call.setdefault("keep_for_backward", True)
    return asyncio.run(layer.forward(inputs, ForwardCall(is_training=is_training, **call), on_host=True))


def backward(layer: BatchNormLayer, forward_id: str, dy: Any, retain: bool = False) -> BackwardOutputs:
    call = layer.check_backward(forward_id, np.asarray(dy))
    return asyncio.run(layer.backward(call, retain=retain, on_host=True)).outputs


def run_updates(layer: BatchNormLayer, *forward_ids: str) -> int:
    return asyncio.run(layer.run_updates(forward_ids))


def release(layer: BatchNormLayer, *forward_ids: str, with_updates: bool = True) -> int:
    return asyncio.run(layer.release(forward_ids, with_updates=with_updates))


def contents(layer: BatchNormLayer) -> dict[str, Any]:
    """Returns all that events have made of a layer, to be compared bit by bit."""
    return {
        "variables": None if layer.variables is None else bits(layer.variables.by_name()),
        "num_updates": layer.num_updates,
        "num_bytes": layer.num_bytes,
        "forwards": [_kept(each) for each in layer.forwards],
        "fates": layer.forwards.outcomes,
    }


def bits(arrays: Mapping[str, Any]) -> dict[str, Any]:
    return {name: (array.dtype, array.shape, array.tobytes()) for name, array in arrays.items()}


def _kept(forward: Forward) -> dict[str, Any]:
    saved, pending = forward.saved, forward.pending
    return {
        "id": forward.forward_id,
        "lease": forward.lease,
        "num_bytes": forward.room.used,
        "saved": saved and (saved.is_training, saved.implementation, bits(saved.by_field())),
        "pending": pending and (pending.implementation, bits({"mean": pending.mean, "variance": pending.variance})),
    }
