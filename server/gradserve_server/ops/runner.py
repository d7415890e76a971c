"""Opens and checks the inputs of ops, and runs the ops on a device, away from the event loop."""

from collections.abc import AsyncIterator, Collection, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, fields, replace
from functools import cached_property
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Generic, TypeVar, get_origin

import numpy as np

from gradserve_server.devices.compute import Compute
from gradserve_server.devices.device import Array, Device, with_all_memory
from gradserve_server.devices.host.loading import KernelLoader
from gradserve_server.errors import ServiceError
from gradserve_server.ops.operation import AttributesT, Family, InputsT, Op, OutputsT, PlanT
from gradserve_server.resources.memory import Memory, Room, Sizes
from gradserve_server.tensors.eviction import Evictor
from gradserve_server.tensors.incoming import IncomingTensors, TensorOpener

T = TypeVar("T")


@dataclass(frozen=True)
class OpenInputs(Generic[InputsT]):
    """The inputs of a call, while it uses them.

    Attributes:
        inputs: Read-only arrays, each in the memory of its device.
        tensors: The same as tensors of the request, which are open.
    """

    inputs: InputsT
    tensors: IncomingTensors


@asynccontextmanager
async def open_inputs(
    opener: TensorOpener, tensors: IncomingTensors, kind: type[InputsT]
) -> AsyncIterator[OpenInputs[InputsT]]:
    """Holds the inputs of a call while it uses them.

    Args:
        opener: Opens the tensors.
        tensors: The tensors; their fields are the names of inputs, "weights[1]" for one of a tuple.
        kind: The dataclass of the inputs.

    Raises:
        InvalidArgumentError: An input is malformed.
        NotFoundError: A handle does not exist.
    """
    async with AsyncExitStack() as used_by_the_call:
        with _inputs_named(tensors):
            await used_by_the_call.enter_async_context(opener.open(tensors))
            arrays = tensors.arrays()
        yield OpenInputs(kind(**joined(kind, arrays)), tensors)


def joined(kind: type[Any], values: Mapping[str, T]) -> dict[str, T | tuple[T, ...]]:
    """Returns values by the names of a dataclass's fields, with the values of a tuple joined."""
    by_field: dict[str, T | tuple[T, ...]] = {}
    for field in fields(kind):
        if field.name in values:
            by_field[field.name] = values[field.name]
        elif get_origin(field.type) is tuple:
            by_field[field.name] = tuple(value for name, value in values.items() if name.startswith(f"{field.name}["))
    return by_field


@contextmanager
def _inputs_named(tensors: IncomingTensors) -> Iterator[None]:
    """Prefixes the message of an error about an input with the name of the input."""
    try:
        yield
    except ServiceError as error:
        for name in [each.field for each in tensors]:
            if error.field is not None and (error.field == name or error.field.startswith(f"{name}.")):
                error.message = f"{name}: {error.message}"
        raise


_NUM_BYTES_OF_ARRAY, _NUM_BYTES_OF_SPEC = attrgetter("nbytes"), attrgetter("num_bytes")


@dataclass(frozen=True)
class CheckedCall(Generic[InputsT, AttributesT, OutputsT, PlanT]):
    """A call of an op with checked inputs and attributes."""

    op: Op[InputsT, AttributesT, OutputsT, PlanT]
    inputs: InputsT
    attributes: AttributesT
    plan: PlanT

    @cached_property
    def arrays(self) -> dict[str, Array]:
        """The inputs by name; see `arrays_of`."""
        return arrays_of(self.inputs)

    @property
    def input_bytes(self) -> int:
        """The size of all inputs."""
        return sum(map(_NUM_BYTES_OF_ARRAY, self.arrays.values()))

    @cached_property
    def output_bytes(self) -> int:
        """The size of all outputs."""
        return sum(map(_NUM_BYTES_OF_SPEC, self.plan.output_specs))

    @property
    def scratch_bytes(self) -> int:
        """The most memory that the computation takes besides inputs and outputs."""
        return self.op.scratch_bytes(self.inputs, self.attributes, self.plan)


@dataclass(frozen=True)
class Computed(Generic[OutputsT]):
    """The results of a call.

    Attributes:
        outputs: The outputs, in host memory if requested, otherwise in the device's.
        moved: Copies of the inputs that had to be moved to the device's memory, by name.
    """

    outputs: OutputsT
    moved: Mapping[str, Array]


def check_call(
    op: Op[InputsT, AttributesT, OutputsT, PlanT], inputs: InputsT, attributes: AttributesT
) -> CheckedCall[InputsT, AttributesT, OutputsT, PlanT]:
    """Checks a call of an op.

    Raises:
        InvalidArgumentError: An argument is not valid.
    """
    return CheckedCall(op, inputs, attributes, op.plan(inputs, attributes))


def arrays_of(values: Any) -> dict[str, Array]:
    """Returns the arrays of a dataclass, except missing ones, by name: "weights[1]" for one of a tuple."""
    arrays: dict[str, Array] = {}
    for field in fields(values):
        value = getattr(values, field.name)
        if isinstance(value, tuple):
            arrays |= {f"{field.name}[{index}]": array for index, array in enumerate(value)}
        elif value is not None:
            arrays[field.name] = value
    return arrays


def with_arrays(values: T, arrays: Mapping[str, Array]) -> T:
    """Returns a dataclass of inputs or outputs with the named arrays replaced."""
    changes: dict[str, Any] = {}
    declared: Any = values
    for field in fields(declared):
        value = getattr(values, field.name)
        if isinstance(value, tuple):
            changes[field.name] = tuple(
                arrays.get(f"{field.name}[{index}]", array) for index, array in enumerate(value)
            )
        elif field.name in arrays:
            changes[field.name] = arrays[field.name]
    changed: T = replace(declared, **changes)
    return changed


class OpRunner:
    """Runs ops on one device. Used on one event loop.

    Kernels are loaded beside the calls, from the first call on at the latest. Until they are ready, calls may take
    longer. On the host, a call asks for those that it needs; of a GPU, where calls would wait for them, all are loaded.
    """

    def __init__(
        self,
        *,
        device: Device,
        families: Mapping[str, Family],
        compute: Compute,
        memory: Memory,
        loader: KernelLoader,
        evictor: Evictor | None = None,
        beside: Mapping[str, Family] = MappingProxyType({}),
    ) -> None:
        """Takes its parts.

        Args:
            device: The device that ops run on.
            families: The families of its ops, by name.
            compute: Runs them, in threads that sums do not wait for.
            memory: The memory of the server.
            loader: Loads kernels, also for the host's families.
            evictor: Makes room in the device's memory; None if the device is the host.
            beside: Other families with kernels, which are prepared before those of the ops.
        """
        self._device = device
        self._families = families
        self._beside = beside
        self._compute = compute
        self._memory = memory
        self._evictor = evictor
        self._loader = loader
        self._is_asked_for_all = False

    def begin(self) -> None:
        """Starts loading what calls have asked for, and all kernels of a GPU, unless that has been started."""
        if self._evictor is not None:
            self.prepare()
        self._loader.begin()

    def prepare(self) -> None:
        """Starts loading or compiling all kernels, whether calls need them or not, unless that has been started."""
        if not self._is_asked_for_all:
            self._is_asked_for_all = True
            for name, family in {**self._beside, **self._families}.items():
                self._loader.want(name, family.prepare)
        self._loader.begin()

    @property
    def is_prepared(self) -> bool:
        """True if the kernels that anybody has asked for are loaded or compiled, and others will be."""
        return self._loader.has_begun and self._loader.is_idle

    @property
    def is_preparing(self) -> bool:
        """True while kernels are being loaded or compiled; False also before anything needs them."""
        return self._loader.has_begun and not self._loader.is_idle

    def close(self) -> None:
        """Stops the preparation without waiting; see `KernelLoader.close`."""
        self._loader.close()

    def join(self) -> None:
        """Waits until the preparation has ended."""
        self._loader.join()

    async def run(
        self,
        call: CheckedCall[InputsT, AttributesT, OutputsT, PlanT],
        *,
        on_host: bool | Collection[str],
        host_bytes: int = 0,
        room: Room | None = None,
    ) -> Computed[OutputsT]:
        """Computes a call. If the device's memory does not suffice, others' stored tensors may move to the host.

        Args:
            call: The call; its inputs may be in host memory or the device's.
            on_host: Whether the outputs are wanted in host memory, or the names of those that are.
            host_bytes: The size of those outputs, if their names are given.
            room: The room that reserves the memory of the outputs and of moved inputs, which stays reserved for
                their keeper. None to reserve it only for the time of the computation.

        Raises:
            ResourceExhaustedError: There is no room for the outputs, or for the scratch memory.
            MemoryError: The host has no memory left.
            UnavailableError: The server stops.
        """
        self.begin()
        reserved = self._memory.room_of_call() if room is None else room
        try:
            if self._evictor is not None:
                wanted = call.output_bytes if on_host is True else host_bytes
                return await self._run_on_device(self._evictor, call, on_host, wanted, reserved)
            before = reserved.host.used
            reserved.host.grow(call.output_bytes + call.scratch_bytes + self._copied_bytes(call))
            try:
                num_bytes = call.input_bytes + call.output_bytes
                if call.op.is_quick and num_bytes <= self._device.inline_bytes:
                    return self._run(call, on_host)
                return await self._compute.run_cancellable(self._run, call, on_host)
            finally:
                reserved.host.settle(before + call.output_bytes)
        finally:
            if room is None:
                reserved.settle()

    async def _run_on_device(
        self,
        evictor: Evictor,
        call: CheckedCall[InputsT, AttributesT, OutputsT, PlanT],
        on_host: bool | Collection[str],
        host_bytes: int,
        room: Room,
    ) -> Computed[OutputsT]:
        before = Sizes(room.host.used, room.device.used)
        room.host.grow(host_bytes)
        kept, scratch = call.output_bytes + self._copied_bytes(call), call.scratch_bytes
        await evictor.grow(room.device, kept + scratch, room.owner)
        computed = await evictor.attempt(
            lambda: self._compute.run_cancellable(self._run, call, on_host), kept + scratch, room.owner
        )
        left = self._memory.sizes([*arrays_of(computed.outputs).values(), *computed.moved.values()])
        room.settle(Sizes(before.host + left.host, before.device + left.device))
        return computed

    def _copied_bytes(self, call: CheckedCall[InputsT, AttributesT, OutputsT, PlanT]) -> int:
        """Returns the size of the inputs to copy, either to the device or because kernels need them aligned."""
        return sum(
            array.nbytes
            for array in call.arrays.values()
            if not self._device.holds(array) or (isinstance(array, np.ndarray) and not array.flags.aligned)
        )

    def _run(
        self, call: CheckedCall[InputsT, AttributesT, OutputsT, PlanT], on_host: bool | Collection[str]
    ) -> Computed[OutputsT]:
        # Ops write to nothing but their outputs, so they can begin again.
        return with_all_memory(self._device, self._attempt, call, on_host)

    def _attempt(
        self, call: CheckedCall[InputsT, AttributesT, OutputsT, PlanT], on_host: bool | Collection[str]
    ) -> Computed[OutputsT]:
        op, device = call.op, self._device
        with device.computing():
            moved = {name: device.from_host(array) for name, array in call.arrays.items() if not device.holds(array)}
            inputs = with_arrays(call.inputs, moved) if moved else call.inputs
            outputs = op.compute(self._families[op.family], inputs, call.attributes, call.plan)
            if on_host:
                arrays = arrays_of(outputs)
                wanted = arrays if on_host is True else set(on_host) & arrays.keys()
                host = {name: device.to_host(arrays[name]) for name in wanted}
                outputs = with_arrays(outputs, host)
        return Computed(outputs, moved)
