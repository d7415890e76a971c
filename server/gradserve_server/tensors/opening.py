"""The one way from the references of a request to arrays."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from numpy.typing import NDArray

from gradserve_server.devices.device import Array
from gradserve_server.errors import InvalidArgumentError
from gradserve_server.tensors.references import Inline, Malformed, Reference, Stored
from gradserve_server.tensors.residence import Residence
from gradserve_server.tensors.store import HeldTensors, TensorSpec, TensorStore


class OpenedTensors:
    """The tensors of a call while it uses them: read-only, each in the memory of the device it lies in.

    They are known by the paths of their fields in the request.
    """

    def __init__(self, references: Mapping[str, Reference], held: HeldTensors, residence: Residence) -> None:
        self._references = references
        self._held = held
        self._residence = residence

    def __getitem__(self, path: str) -> Array:
        """Returns an array.

        Raises:
            InvalidArgumentError: What the request says of it is not true of any tensor, or not of the stored one.
        """
        reference = self._references[path]
        if isinstance(reference, Inline):
            return reference.array
        if isinstance(reference, Malformed):
            raise _malformed(reference, path)
        array = self._held.arrays[reference.handle]
        if reference.spec is not None:
            _check_spec(reference.spec, array, path)
        return array

    def arrays(self) -> dict[str, Array]:
        """Returns all arrays by path.

        Raises:
            InvalidArgumentError: What the request says of one is not true.
        """
        return {path: self[path] for path in self._references}

    def is_stored(self, path: str) -> bool:
        """Tells whether a tensor is on the server, rather than in the request."""
        return isinstance(self._references[path], Stored)

    @property
    def exclusive(self) -> bool:
        """True if nobody else sees the stored tensors, now or later, nor the call one of them twice: it may write."""
        if not self._held.exclusive:
            return False
        return sum(isinstance(reference, Stored) for reference in self._references.values()) == len(self._held.arrays)

    def share(self) -> None:
        """Notes that memory of the stored tensors, or of what `relocate` puts in their place, will outlast the call.

        Nobody takes it over then.
        """
        self._held.share()

    def relocate(self, arrays: Mapping[str, Array]) -> None:
        """Puts copies that nobody else knows of, by path, in the place of stored tensors."""
        for path, array in arrays.items():
            reference = self._references.get(path)
            if isinstance(reference, Stored):
                self._held.relocate(reference.handle, array)

    @property
    def is_on_host(self) -> bool:
        """True if all tensors are in host memory."""
        return self._residence.is_on_host(self._held.arrays.values())

    async def copy_to_host(self) -> dict[str, NDArray[Any]]:
        """Returns all arrays by path, in host memory: themselves if they are there already.

        Raises:
            InvalidArgumentError: What the request says of one is not true.
            MemoryError: There is not that much memory.
        """
        arrays = self.arrays()
        return dict(zip(arrays, await self._residence.copy_to_host(list(arrays.values())), strict=True))

    async def bring_to_host(self) -> None:
        """Makes all tensors lie in host memory, now and for later calls.

        Raises:
            MemoryError: There is not that much memory.
        """
        handles = list(self._held.arrays)
        copies = await self._residence.copy_to_host(list(self._held.arrays.values()))
        for handle, copy in zip(handles, copies, strict=True):
            if copy is not self._held.arrays[handle]:
                self._held.relocate(handle, copy)


class TensorOpener:
    """Opens what requests refer to."""

    def __init__(self, store: TensorStore, residence: Residence) -> None:
        self._store = store
        self._residence = residence

    @contextmanager
    def open(self, references: Mapping[str, Reference], *, release: bool = False) -> Iterator[OpenedTensors]:
        """Holds the tensors of a request while a call uses them, and renews their leases.

        Args:
            references: By the paths of their fields in the request.
            release: Delete those that are stored when the block is left without an exception. From the start nobody
                else can find them; after an exception they are there again.

        Raises:
            NotFoundError: A stored one does not exist.
        """
        stored = {path: each.handle for path, each in references.items() if isinstance(each, Stored)}
        if not stored:
            yield OpenedTensors(references, HeldTensors(()), self._residence)
            return
        fields = [f"{path}.handle" for path in stored]
        with self._store.use(list(stored.values()), release=release, fields=fields) as held:
            yield OpenedTensors(references, held, self._residence)


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
