"""The calls of clients that concern tensors on the server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.typing import ArrayLike, NDArray

from gradserve.calls import tensors
from gradserve.calls.client.state import ClientState
from gradserve.calls.exchange import Operation
from gradserve.conversion.argument import Argument
from gradserve.conversion.arrays import as_array
from gradserve.conversion.handles import as_handle, as_handles
from gradserve.conversion.plain import as_list
from gradserve.results import TensorHandle


class TensorsOfClient(ClientState):
    """Stores, reads, lists and deletes tensors."""

    def put(self, value: ArrayLike, *, lease: float | None = None) -> Operation[TensorHandle]:
        """Stores an array on the server, under a handle that whoever has it can use.

        Args:
            value: The array.
            lease: Seconds it lives without being used; None for the server's default.

        Raises:
            InvalidArgumentError: No tensor can have its dtype.
            ResourceExhaustedError: It does not fit.
        """
        (handle,) = yield from tensors.put([as_array(value, Argument("value"))], lease)
        return handle

    def put_all(self, values: Sequence[ArrayLike], *, lease: float | None = None) -> Operation[list[TensorHandle]]:
        """Stores several arrays in one stream, all or none; see `put`."""
        given = as_list(values, "a list of arrays", Argument("values"))
        arrays = [as_array(value, Argument(f"values[{index}]")) for index, value in enumerate(given)]
        return (yield from tensors.put(arrays, lease))

    def get(self, handle: TensorHandle, *, release: bool = False) -> Operation[NDArray[Any]]:
        """Reads a stored array; `release` deletes it then.

        Raises:
            NotFoundError: It does not exist (any more).
        """
        (array,) = yield from tensors.get([as_handle(handle, Argument("handle"))], release=release)
        return array

    def get_all(self, handles: Sequence[TensorHandle], *, release: bool = False) -> Operation[list[NDArray[Any]]]:
        """Reads several stored arrays in one stream; see `get`."""
        given = as_list(handles, "a list of TensorHandles", Argument("handles"))
        return tensors.get(as_handles(given, "handles"), release=release)

    def delete(self, *handles: TensorHandle) -> Operation[int]:
        """Deletes stored arrays; returns how many of them there were."""
        return tensors.delete(as_handles(handles, "handles"))

    def list_tensors(self) -> Operation[list[TensorHandle]]:
        """Lists all stored arrays, oldest first."""
        return tensors.list_stored()
