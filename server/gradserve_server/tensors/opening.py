"""Opens the tensors to which requests refer."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from numpy.typing import NDArray

from gradserve_server.devices.device import Array
from gradserve_server.errors import InvalidArgumentError
from gradserve_server.tensors.quotas import Account
from gradserve_server.tensors.references import Inline, Malformed, Reference, Stored
from gradserve_server.tensors.residence import Residence
from gradserve_server.tensors.spec import TensorSpec
from gradserve_server.tensors.store import HeldTensors, TensorStore


class OpenedTensors:
    """The open tensors of a call: read-only, each in the memory of its device.

    Their names are the paths of their fields in the request.
    """

    def __init__(self, references: Mapping[str, Reference], held: HeldTensors, residence: Residence) -> None:
        self._references = references
        self._held = held
        self._residence = residence

    def __getitem__(self, path: str) -> Array:
        """Returns an array.

        Raises:
            InvalidArgumentError: The request describes no possible tensor, or not the stored one.
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
            InvalidArgumentError: The request describes one of them wrongly.
        """
        return {path: self[path] for path in self._references}

    def is_stored(self, path: str) -> bool:
        """Returns True if a tensor is stored on the server, rather than in the request."""
        return isinstance(self._references[path], Stored)

    @property
    def exclusive(self) -> bool:
        """True if the call may write: nobody else sees the stored tensors, now or later, nor does it use one twice."""
        if not self._held.exclusive:
            return False
        return sum(isinstance(reference, Stored) for reference in self._references.values()) == len(self._held.arrays)

    @property
    def memory(self) -> tuple[Account, ...]:
        """The accounts of the stored tensors' memory, from which those who take it over take it."""
        return self._held.memory

    def share(self) -> None:
        """Notes that memory of the stored tensors, or of copies that `relocate` takes, will be used after the call.

        So nobody may take it over.
        """
        self._held.share()

    def relocate(self, arrays: Mapping[str, Array]) -> None:
        """Replaces stored tensors by copies that nobody else knows of, by path."""
        for path, array in arrays.items():
            reference = self._references.get(path)
            if isinstance(reference, Stored):
                self._held.relocate(reference.handle, array)

    @property
    def is_on_host(self) -> bool:
        """True if all tensors are in host memory."""
        return self._residence.is_on_host(self._held.arrays.values())

    async def copy_to_host(self) -> dict[str, NDArray[Any]]:
        """Returns all arrays by path, in host memory; copies only those that are elsewhere.

        Raises:
            InvalidArgumentError: The request describes one of them wrongly.
            MemoryError: There is not enough memory.
        """
        arrays = self.arrays()
        return dict(zip(arrays, await self._residence.copy_to_host(list(arrays.values())), strict=True))

    async def bring_to_host(self) -> None:
        """Moves all tensors to host memory, for this call and later ones.

        Raises:
            MemoryError: There is not enough memory.
        """
        handles = list(self._held.arrays)
        copies = await self._residence.copy_to_host(list(self._held.arrays.values()))
        for handle, copy in zip(handles, copies, strict=True):
            if copy is not self._held.arrays[handle]:
                self._held.relocate(handle, copy)


class TensorOpener:
    """Opens the tensors to which requests refer."""

    def __init__(self, store: TensorStore, residence: Residence) -> None:
        self._store = store
        self._residence = residence

    @contextmanager
    def open(self, references: Mapping[str, Reference], *, release: bool = False) -> Iterator[OpenedTensors]:
        """Holds the tensors of a request while a call uses them, and renews their leases.

        Args:
            references: The references, by the paths of their fields in the request.
            release: Whether to delete the stored ones when the block is left without an exception. Nobody else can
                find them from the start; after an exception everybody can again.

        Raises:
            NotFoundError: A stored tensor does not exist.
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
