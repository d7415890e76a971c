"""One face for all ways to use accumulators: the core without a socket, both clients, and the raw ops of both.

Scenarios are written once, against `Face`; each way maps it onto its own calls and its errors onto the client's.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike

import gradserve
import gradserve.aio
from gradserve_protocol.arrays import parse_dtype
from gradserve_server.accumulators.accumulator import Accumulator
from gradserve_server.accumulators.factory import AccumulatorFactory
from gradserve_server.accumulators.gradient import Average, Contribution, Gradient, SparseSlices
from gradserve_server.accumulators.places.place import HostPlace, Places
from gradserve_server.accumulators.registry import AccumulatorRegistry
from gradserve_server.accumulators.spec import (
    AccumulatorSpec,
    ComponentSpec,
    Layout,
    PartialShape,
    Reduction,
)
from gradserve_server.config import LimitsConfig
from gradserve_server.devices.compute import InlineCompute
from gradserve_server.devices.host.kernels import ForkJoin
from gradserve_server.devices.host.reduction import Reducer
from gradserve_server.errors import ServiceError
from gradserve_server.resources.budget import Budget
from gradserve_server.resources.lifetimes import Lifetimes
from gradserve_server.resources.registry import ResourceKey
from tests.accumulators.bench import opened
from tests.accumulators.places.on_device import OnDevice
from tests.servers.polling import PATIENCE_SECONDS

Shape = tuple[int | None, ...] | None
Sparse = gradserve.IndexedSlices


class Acc(Protocol):
    """An accumulator, dense or sparse."""

    async def apply(self, gradient: Any, local_step: int = 0) -> gradserve.Outcome | None:
        """None where the way does not tell what became of the gradient."""

    async def take(self, num_required: int) -> Any: ...

    async def num_accumulated(self) -> int: ...

    async def set_global_step(self, step: int) -> None: ...

    async def num_waiting(self) -> int: ...


class Face(Protocol):
    """A way to use accumulators."""

    async def dense(self, dtype: str, shape: Shape = None, reduction: str = "MEAN") -> Acc: ...

    async def sparse(self, dtype: str, shape: Shape = None, reduction: str = "MEAN") -> Acc: ...


class CoreFace:
    """The domain core: no socket, no thread, no clock."""

    def __init__(self, places: Callable[[HostPlace], Places] = Places) -> None:
        self._names = map(str, itertools.count())
        self.memory = Budget(1 << 40, "bytes")
        lifetimes = Lifetimes(lambda: 0.0, 60.0)
        factory = AccumulatorFactory(
            places=places(HostPlace("cpu", Reducer(ForkJoin(1)), np.empty, InlineCompute(), self.memory)),
            bookkeeping=Budget(1 << 40, "bytes"),
            limits=LimitsConfig(),
            lifetimes=lifetimes,
        )
        self._registry = AccumulatorRegistry(factory, lifetimes, new_incarnation=self._names.__next__)

    async def dense(self, dtype: str, shape: Shape = None, reduction: str = "MEAN") -> Acc:
        return self._create(dtype, shape, reduction, Layout.DENSE)

    async def sparse(self, dtype: str, shape: Shape = None, reduction: str = "MEAN") -> Acc:
        return self._create(dtype, shape, reduction, Layout.SPARSE)

    def _create(self, dtype: str, shape: Shape, reduction: str, layout: Layout) -> "CoreAcc":
        try:
            kind = Reduction(reduction)
        except ValueError as error:
            raise gradserve.InvalidArgumentError(str(error)) from None
        dims = None if shape is None else tuple(-1 if size is None else size for size in shape)
        component = ComponentSpec("", parse_dtype(dtype), PartialShape(dims), layout)
        key = ResourceKey("test", next(self._names))
        accumulator, _created = self._registry.create(key, AccumulatorSpec((component,), kind))
        return CoreAcc(accumulator, component)


class CoreAcc:
    def __init__(self, accumulator: Accumulator, component: ComponentSpec) -> None:
        self._accumulator = accumulator
        self._component = component

    async def apply(self, gradient: Any, local_step: int = 0) -> gradserve.Outcome:
        value = self._value(gradient)
        with client_errors():
            applied, _duplicate = await self._accumulator.apply(
                None, Contribution(local_step=local_step), opened(Gradient({"": value}))
            )
        return gradserve.STALE if applied.round is None else gradserve.ACCEPTED

    async def take(self, num_required: int) -> Any:
        with client_errors():
            average, _duplicate = await self._accumulator.take(None, num_required, None)
        return _client_value(await average.on_host())

    async def num_accumulated(self) -> int:
        return self._accumulator.num_accumulated

    async def set_global_step(self, step: int) -> None:
        await self._accumulator.set_global_step(step)

    async def num_waiting(self) -> int:
        return self._accumulator.state.num_waiting

    def _value(self, gradient: Any) -> Any:
        dtype = self._component.dtype
        if isinstance(gradient, Sparse):
            return SparseSlices(
                np.asarray(gradient.indices, np.int64), np.asarray(gradient.values, dtype), gradient.dense_shape
            )
        return np.asarray(gradient, dtype)


def _client_value(average: Average) -> Any:
    (value,) = average.values.values()
    if isinstance(value, SparseSlices):
        return Sparse(value.values, value.indices, value.dense_shape)
    return value


class client_errors:  # noqa: N801 - reads as a function
    """Turns the domain's errors into the client's of the same name."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ServiceError):
            raise getattr(gradserve, type(error).__name__)(error.message, field=error.field) from error


class AioFace:
    """The asyncio client against a real server."""

    def __init__(self, client: gradserve.aio.Client) -> None:
        self._client = client

    async def dense(self, dtype: str, shape: Shape = None, reduction: str = "MEAN") -> Acc:
        return AioAcc(await self._client.conditional_accumulator(dtype, shape, reduction_type=reduction))

    async def sparse(self, dtype: str, shape: Shape = None, reduction: str = "MEAN") -> Acc:
        return AioAcc(await self._client.sparse_conditional_accumulator(dtype, shape, reduction_type=reduction))


class AioAcc:
    def __init__(self, accumulator: Any) -> None:
        self._accumulator = accumulator

    async def apply(self, gradient: Any, local_step: int = 0) -> gradserve.Outcome:
        if isinstance(gradient, Sparse):
            result = await self._accumulator.apply_indexed_slices_grad(gradient, local_step)
        else:
            result = await self._accumulator.apply_grad(gradient, local_step)
        return result.outcome  # type: ignore[no-any-return]

    async def take(self, num_required: int) -> Any:
        return await self._accumulator.take_grad(num_required)

    async def num_accumulated(self) -> int:
        return await self._accumulator.num_accumulated()  # type: ignore[no-any-return]

    async def set_global_step(self, step: int) -> None:
        await self._accumulator.set_global_step(step)

    async def num_waiting(self) -> int:
        return (await self._accumulator.info()).num_waiting  # type: ignore[no-any-return]


class BlockingFace:
    """The blocking client against a real server, its calls in threads."""

    def __init__(self, client: gradserve.Client, threads: Executor) -> None:
        self._client = client
        self._threads = threads

    async def dense(self, dtype: str, shape: Shape = None, reduction: str = "MEAN") -> Acc:
        return BlockingAcc(self._client.conditional_accumulator(dtype, shape, reduction_type=reduction), self._threads)

    async def sparse(self, dtype: str, shape: Shape = None, reduction: str = "MEAN") -> Acc:
        accumulator = self._client.sparse_conditional_accumulator(dtype, shape, reduction_type=reduction)
        return BlockingAcc(accumulator, self._threads)


class BlockingAcc:
    def __init__(self, accumulator: Any, threads: Executor) -> None:
        self._accumulator = accumulator
        self._threads = threads

    async def apply(self, gradient: Any, local_step: int = 0) -> gradserve.Outcome:
        kind = "apply_indexed_slices_grad" if isinstance(gradient, Sparse) else "apply_grad"
        result = await self._in_thread(getattr(self._accumulator, kind), gradient, local_step)
        return result.outcome  # type: ignore[no-any-return]

    async def take(self, num_required: int) -> Any:
        return await self._in_thread(self._accumulator.take_grad, num_required)

    async def num_accumulated(self) -> int:
        return self._accumulator.num_accumulated()  # type: ignore[no-any-return]

    async def set_global_step(self, step: int) -> None:
        self._accumulator.set_global_step(step)

    async def num_waiting(self) -> int:
        return self._accumulator.info().num_waiting  # type: ignore[no-any-return]

    async def _in_thread(self, call: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call, *args)


class RawOpsFace:
    """The raw ops of a client against a real server."""

    def __init__(
        self,
        call: Callable[..., Awaitable[Any]],
        list_accumulators: Callable[[], Awaitable[list[gradserve.AccumulatorInfo]]],
        dense_prefix: str,
    ) -> None:
        """`call` calls an op; `dense_prefix` chooses one of the two families for dense gradients."""
        self.call = call
        self.list_accumulators = list_accumulators
        self.dense_prefix = dense_prefix

    async def dense(self, dtype: str, shape: Shape = None, reduction: str = "MEAN") -> Acc:
        op = f"{self.dense_prefix}ConditionalAccumulator"
        handle = await self.call(op, dtype=dtype, shape=shape, reduction_type=reduction)
        return RawOpsDenseAcc(self, handle, f"{self.dense_prefix}Accumulator")

    async def sparse(self, dtype: str, shape: Shape = None, reduction: str = "MEAN") -> Acc:
        op = "SparseConditionalAccumulator"
        handle = await self.call(op, dtype=dtype, shape=shape, reduction_type=reduction)
        return RawOpsSparseAcc(self, handle, "Accumulator")


class RawOpsAcc:
    def __init__(self, face: RawOpsFace, handle: gradserve.AccumulatorHandle, family: str) -> None:
        self._face = face
        self._handle = handle
        self._family = family

    async def num_accumulated(self) -> int:
        return int(await self._call(f"{self._family}NumAccumulated"))

    async def set_global_step(self, step: int) -> None:
        await self._call(f"{self._family}SetGlobalStep", new_global_step=step)

    async def num_waiting(self) -> int:
        (info,) = (each for each in await self._face.list_accumulators() if each.name == self._handle.name)
        return info.num_waiting

    async def _call(self, op: str, **arguments: Any) -> Any:
        return await self._face.call(op, handle=self._handle, **arguments)


class RawOpsDenseAcc(RawOpsAcc):
    async def apply(self, gradient: Any, local_step: int = 0) -> None:
        value = np.asarray(gradient, self._handle.dtype)
        await self._call(f"{self._family}ApplyGradient", local_step=local_step, gradient=value)

    async def take(self, num_required: int) -> Any:
        return await self._call(f"{self._family}TakeGradient", num_required=num_required, dtype=self._handle.dtype)


class RawOpsSparseAcc(RawOpsAcc):
    async def apply(self, gradient: Any, local_step: int = 0) -> None:
        await self._call(
            "SparseAccumulatorApplyGradient",
            local_step=local_step,
            gradient_indices=gradient.indices,
            gradient_values=np.asarray(gradient.values, self._handle.dtype),
            gradient_shape=() if gradient.dense_shape is None else gradient.dense_shape,
            has_known_shape=gradient.dense_shape is not None,
        )

    async def take(self, num_required: int) -> Any:
        outputs = await self._call("SparseAccumulatorTakeGradient", num_required=num_required, dtype=self._handle.dtype)
        assert outputs.shape.dtype == np.int64
        return Sparse(outputs.values, outputs.indices, tuple(outputs.shape.tolist()))


WAYS = ("shared_memory", "bulk", "grpc")
FACES = (
    "core",
    "core on a device",
    *(f"blocking over {way}" for way in WAYS),
    *(f"aio over {way}" for way in WAYS),
    "raw_ops",
    "aio_raw_ops",
)


@asynccontextmanager
async def open_face(
    kind: str,
    address: Callable[[], str],
    tls: gradserve.TLS | None = None,
    programs: Callable[[], Path] | None = None,
) -> AsyncIterator[Face]:
    """Opens one of FACES.

    Args:
        kind: Its name.
        address: Starts the server when it is needed.
        tls: Encrypts connections.
        programs: Returns where programs of a device are compiled to; not needed without one.
    """
    way: Any
    client_kind, _, way = kind.partition(" over ")
    if kind == "core":
        yield CoreFace()
    elif kind == "core on a device":
        assert programs is not None
        yield CoreFace(OnDevice(programs()).places)
    elif client_kind == "aio":
        async with gradserve.aio.connect(address(), timeout=PATIENCE_SECONDS, transport=way, tls=tls) as aio_client:
            yield AioFace(aio_client)
    elif kind == "aio_raw_ops":
        async with gradserve.aio.connect(address(), timeout=PATIENCE_SECONDS, tls=tls) as aio_client:

            async def awaited(op: str, **arguments: Any) -> Any:
                return await getattr(aio_client.raw_ops, op)(**arguments)

            yield RawOpsFace(awaited, aio_client.list_accumulators, dense_prefix="Resource")
    elif kind == "raw_ops":
        with (
            ThreadPoolExecutor(16) as threads,
            gradserve.connect(address(), timeout=PATIENCE_SECONDS, tls=tls) as client,
        ):

            async def in_thread(op: str, **arguments: Any) -> Any:
                call = partial(getattr(client.raw_ops, op), **arguments)
                return await asyncio.get_running_loop().run_in_executor(threads, call)

            async def listed() -> list[gradserve.AccumulatorInfo]:
                return client.list_accumulators()

            yield RawOpsFace(in_thread, listed, dense_prefix="")
    else:
        # As many threads as a scenario has calls at once.
        with (
            ThreadPoolExecutor(16) as threads,
            gradserve.connect(address(), timeout=PATIENCE_SECONDS, transport=way, tls=tls) as client,
        ):
            yield BlockingFace(client, threads)


def rows(indices: ArrayLike, values: ArrayLike, shape: tuple[int, ...] | None = None) -> Sparse:
    """A sparse gradient."""
    return Sparse(np.asarray(values, np.float64), np.asarray(indices), shape)
