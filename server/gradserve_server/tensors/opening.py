"""Opens the tensors that requests refer to."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from gradserve_server.devices.device import Array
from gradserve_server.errors import InvalidArgumentError
from gradserve_server.resources.budget import Reservation
from gradserve_server.resources.memory import Room
from gradserve_server.tensors.held import HeldTensors
from gradserve_server.tensors.references import (
    Attached,
    Inline,
    Live,
    LiveOnGpu,
    Malformed,
    Payload,
    Reference,
    Stored,
)
from gradserve_server.tensors.residence import Residence
from gradserve_server.tensors.spec import TensorSpec
from gradserve_server.tensors.store import TensorStore

T = TypeVar("T")


class OpenedTensors:
    """The open tensors of a call: read-only, each in the memory of its device.

    Their names are the paths of their fields in the request.
    """

    def __init__(self, references: Mapping[str, Reference], held: HeldTensors, residence: Residence) -> None:
        self._references = references
        self._given = references
        self._held = held
        self._residence = residence

    def __getitem__(self, path: str) -> Array:
        """Returns an array, or a copy if it is in host memory that the client can change.

        Live GPU memory is not copied: only calls that treat elements as nothing but numbers get it.

        Raises:
            InvalidArgumentError: The request describes no possible tensor, or not the stored one.
        """
        reference = self._references[path]
        if isinstance(reference, Live):
            return np.array(reference.array)
        if isinstance(reference, Attached) and not reference.payload.is_filled:
            return reference.array.copy()  # a view would keep memory alive that nobody counts
        if isinstance(reference, Inline | Attached | LiveOnGpu):
            return reference.array
        if isinstance(reference, Malformed):
            raise _malformed(reference, path)
        array = self._held.arrays[reference.handle]
        if reference.spec is not None:
            _check_spec(reference.spec, array, path)
        return array

    def in_place(self, path: str) -> Array:
        """Returns an array without copying it, even if the client can change it at any time.

        For code that reads each element once, and only as a number: not as an index, length or count.

        Raises:
            InvalidArgumentError: See `__getitem__`.
        """
        reference = self._references[path]
        return reference.array if isinstance(reference, Live) else self[path]

    def is_live(self, path: str) -> bool:
        """Returns True if a tensor is in the client's memory, and can change at any time."""
        return isinstance(self._references[path], Live | LiveOnGpu)

    @property
    def lenders(self) -> tuple[Payload, ...]:
        """The payloads with tensors in the client's memory, including tensors that were copied since."""
        lent = {id(each.payload): each.payload for each in self._given.values() if isinstance(each, Live | LiveOnGpu)}
        return tuple(lent.values())

    async def copy_live(self, paths: Iterable[str]) -> None:
        """Copies those tensors that the client can change; later reads find the copies.

        Raises:
            MemoryError: There is not enough memory.
        """
        live = {path: each for path in paths if isinstance(each := self._references[path], Live)}
        if not live:
            return
        copies = await self._residence.copy([each.array for each in live.values()])
        inline = {path: Inline(copy) for path, copy in zip(live, copies, strict=True)}
        self._references = {**self._references, **inline}

    def arrays(self) -> dict[str, Array]:
        """Returns all arrays by path.

        Raises:
            InvalidArgumentError: The request describes one of them wrongly.
        """
        return {path: self[path] for path in self._references}

    def is_stored(self, path: str) -> bool:
        """Returns True if a tensor is stored on the server, rather than in the request."""
        return isinstance(self._references[path], Stored)

    @property
    def exclusive(self) -> bool:
        """True if the call may write to all tensors: no other call can ever see them, and none is used twice."""
        num_stored = num_attached = 0
        for each in self._references.values():
            if isinstance(each, Live | LiveOnGpu) or (isinstance(each, Attached) and not each.payload.is_filled):
                return False
            num_stored += isinstance(each, Stored)
            num_attached += isinstance(each, Attached)
        if num_stored:
            return self._held.exclusive and num_stored == len(self._held.arrays)
        return num_attached > 0

    @property
    def memory(self) -> tuple[Reservation, ...]:
        """The reservations of the tensors' memory, for callers that take it over."""
        payloads = {id(each.payload): each.payload for each in self._references.values() if isinstance(each, Attached)}
        attached = tuple(each.memory for each in payloads.values() if each.memory is not None)
        return (*self._held.memory, *attached)

    def share(self) -> None:
        """Notes that the call will use the stored tensors' memory, or that of copies from `relocate`, after it ends.

        So no other call may take it over.
        """
        self._held.share()

    def relocate(self, arrays: Mapping[str, Array], room: Room) -> None:
        """Replaces stored tensors by private copies.

        Args:
            arrays: The copies by path; those of tensors that are not stored are ignored.
            room: The call's reservation for the copies.
        """
        for path, array in arrays.items():
            reference = self._references.get(path)
            if isinstance(reference, Stored):
                self._held.relocate(reference.handle, array, room)

    @property
    def is_on_host(self) -> bool:
        """True if all tensors are in host memory."""
        return not any(isinstance(each, LiveOnGpu) for each in self._references.values()) and (
            self._residence.is_on_host(self._held.arrays.values())
        )

    async def copy_to_host(self) -> dict[str, NDArray[Any]]:
        """Returns all arrays by path, in host memory; copies only those that are elsewhere.

        Raises:
            InvalidArgumentError: The request describes one of them wrongly.
            MemoryError: There is not enough memory.
        """
        arrays = self.arrays()
        return dict(zip(arrays, await self._residence.copy_to_host(list(arrays.values())), strict=True))

    async def bring_to_host(self) -> None:
        """Moves all tensors to host memory, for this call and later ones; copies those in the client's memory of a GPU.

        Raises:
            ResourceExhaustedError: There is not enough memory.
            MemoryError: Likewise.
        """
        await self._copy_from_gpu(
            {path: each for path, each in self._references.items() if isinstance(each, LiveOnGpu)}
        )
        handles = list(self._held.arrays)
        with self._held.room_on_host() as room:
            copies = await self._residence.copy_to_host(list(self._held.arrays.values()))
            for handle, copy in zip(handles, copies, strict=True):
                if copy is not self._held.arrays[handle]:
                    self._held.relocate(handle, copy, room)

    async def _copy_from_gpu(self, live: Mapping[str, LiveOnGpu]) -> None:
        for each in live.values():
            each.payload.adopt(each.array.nbytes)
        copies = await self._residence.copy_to_host([each.array for each in live.values()])
        attached = {path: Attached(copy, live[path].payload) for path, copy in zip(live, copies, strict=True)}
        self._references = {**self._references, **attached}


class TensorOpener:
    """Opens the tensors that requests refer to."""

    def __init__(self, store: TensorStore, residence: Residence) -> None:
        self._store = store
        self._residence = residence

    def open(
        self, references: Mapping[str, Reference], *, release: bool = False
    ) -> AbstractContextManager[OpenedTensors]:
        """Holds the tensors of a request while a call uses them, and renews their leases.

        Args:
            references: The references, by the paths of their fields in the request.
            release: Whether to delete the stored ones when the block ends without an exception. They are hidden from
                other calls from the start, and reappear after an exception.

        The block raises NotFoundError at its beginning if a stored tensor does not exist.
        """
        stored = _stored(references)
        if stored:
            return self._open_stored(references, stored, release)
        return _InUse(
            _payloads_of(references.values()), OpenedTensors(references, self._store.nothing_held, self._residence)
        )

    @asynccontextmanager
    async def open_many(
        self, references: Mapping[str, Reference], *, release: bool = False
    ) -> AsyncIterator[OpenedTensors]:
        """Does what `open` does for any number of tensors, in several turns of the event loop."""
        # Most of it can run in any thread; what is left of it takes a turn for some tensors at a time.
        payloads, stored = await asyncio.to_thread(lambda: (_payloads_of(references.values()), _stored(references)))
        if not stored:
            with _InUse(payloads, None):
                yield OpenedTensors(references, self._store.nothing_held, self._residence)
            return
        fields, handles = await asyncio.to_thread(_fields_and_handles, stored)
        user = next(iter(stored.values())).user
        with _InUse(payloads, None):
            async with self._store.use_many(handles, release=release, fields=fields, user=user) as held:
                yield OpenedTensors(references, held, self._residence)

    @contextmanager
    def _open_stored(
        self, references: Mapping[str, Reference], stored: Mapping[str, Stored], release: bool
    ) -> Iterator[OpenedTensors]:
        fields, handles = _fields_and_handles(stored)
        user = next(iter(stored.values())).user  # all of them come from one request
        with (
            _InUse(_payloads_of(references.values()), None),
            self._store.use(handles, release=release, fields=fields, user=user) as held,
        ):
            yield OpenedTensors(references, held, self._residence)


class _InUse(AbstractContextManager[T]):
    """Notes that a call uses payloads, each for a number of tensors."""

    __slots__ = ("_payloads", "_value")

    def __init__(self, payloads: Mapping[Payload, int], value: T) -> None:
        self._payloads = payloads
        self._value = value

    def __enter__(self) -> T:
        for payload, num_tensors in self._payloads.items():
            payload.begin_use(num_tensors)
        return self._value

    def __exit__(self, *_: object) -> None:
        for payload in self._payloads:
            payload.end_use()


def _payloads_of(references: Iterable[Reference]) -> dict[Payload, int]:
    """Returns the payloads of references, with the number of references to each."""
    payloads: dict[Payload, int] = {}
    for each in references:
        if isinstance(each, Attached | Live | LiveOnGpu):
            payloads[each.payload] = payloads.get(each.payload, 0) + 1
    return payloads


def _stored(references: Mapping[str, Reference]) -> dict[str, Stored]:
    return {path: each for path, each in references.items() if isinstance(each, Stored)}


def _fields_and_handles(stored: Mapping[str, Stored]) -> tuple[list[str], list[str]]:
    return [f"{path}.handle" for path in stored], [each.handle for each in stored.values()]


def _check_spec(spec: TensorSpec | Malformed, array: Array, path: str) -> None:
    if isinstance(spec, Malformed):
        raise _malformed(spec, path)
    if (spec.dtype, spec.shape) != (array.dtype, array.shape):
        raise InvalidArgumentError(
            f"expected the stored tensor's shape {list(array.shape)} of {array.dtype}, "
            f"got {list(spec.shape)} of {spec.dtype}",
            field=path,
        )


def _malformed(what: Malformed, path: str) -> InvalidArgumentError:
    return InvalidArgumentError(what.message, field=path + what.field)
