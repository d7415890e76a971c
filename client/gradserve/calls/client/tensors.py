"""The client's calls about tensors on the server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from numpy.typing import NDArray

from gradserve.calls import tensors
from gradserve.calls.client.state import ClientState
from gradserve.calls.exchange import Allocate, Operation, tracked
from gradserve.conversion.arrays import as_dtype
from gradserve.conversion.plain import as_handle, as_handles, as_list, as_shape, as_text
from gradserve.conversion.tensors import as_output, as_tensor
from gradserve.results import ArrayLike, DTypeLike, TensorHandle
from gradserve_protocol.argument import Argument
from gradserve_protocol.arrays import Array
from gradserve_protocol.gpu import GpuArray


class TensorsOfClient(ClientState):
    """Stores, reads, lists and deletes tensors."""

    def empty(self, shape: int | Sequence[int], dtype: DTypeLike) -> Operation[NDArray[Any]]:
        """Returns an array, whose values are arbitrary, for gradients that a server on this machine reads in place.

        Sends nothing. The array, and any view of it, is used like any other; only gradients computed straight into it
        need no copy on their way to the server. Where no memory is shared, it is an ordinary array.

        Args:
            shape: The shape of the array.
            dtype: Its dtype, one that tensors can have.

        Raises:
            InvalidArgumentError: The shape or the dtype is not possible.
            ResourceExhaustedError: This machine has not enough memory.
        """
        given = (shape,) if isinstance(shape, int) else shape
        sizes = as_shape(given, Argument("shape"))
        array: NDArray[Any] = yield Allocate(sizes, as_dtype(dtype, Argument("dtype")))
        return array

    def put(
        self,
        value: ArrayLike,
        *,
        lease: float | None = None,
        device: str = "",
        progress: Callable[[int, int], object] | bool | None = None,
    ) -> Operation[TensorHandle]:
        """Stores an array on the server. Any client that has the handle can use it.

        Args:
            value: An array of any library, or numbers.
            lease: Seconds that the array lives without use. None: the server's default.
            device: Where it is put on the server: "cpu" for the host's memory, the name of the device that ops run on
                (`server_info().device`), or "auto" for that device. It is copied there while it arrives. Whatever
                needs it elsewhere moves it. By default, an array on the GPU of the ops stays there if the server can
                read it there (docs/gpu_arrays.md), and all others are put into the host's memory.
            progress: A callable that gets the transfer's progress: `progress(bytes_done, bytes_total)`. It is called
                first with 0, then at most every 50 ms, and at last, when the call has succeeded, with the total;
                `bytes_done` never falls. It runs in the thread or event loop of the call, which waits for it. An
                exception from it ends the call, and the client can be used further. True: show a bar on standard
                error, if that is a terminal. None, False: tell nobody.

        Returns:
            The handle: an input of ops, a gradient for accumulators, and the argument of `get`.

        Raises:
            InvalidArgumentError: `value` is neither an array nor numbers, or has a dtype that tensors cannot have, or
                `progress` cannot be called.
            ResourceExhaustedError: The array does not fit into the server's memory.
        """
        where = as_text(device, Argument("device"))
        put = partial(tensors.put, [as_tensor(value, Argument("value"))], lease, where)
        (handle,) = yield from tracked(progress, put)
        return handle

    def put_all(
        self,
        values: Sequence[ArrayLike],
        *,
        lease: float | None = None,
        device: str = "",
        progress: Callable[[int, int], object] | bool | None = None,
    ) -> Operation[list[TensorHandle]]:
        """Stores several arrays in one stream, either all or none.

        Args:
            values: Arrays of any library, or numbers.
            lease: Seconds that each array lives without use. None: the server's default.
            device: Where they are put on the server; see `put`.
            progress: Told how far the transfer of all of them is; see `put`.

        Returns:
            The handles, in the order of the arrays.

        Raises:
            GradserveError: See `put`.
        """
        given = as_list(values, "a list of arrays", Argument("values"))
        arrays = [as_tensor(value, Argument(f"values[{index}]")) for index, value in enumerate(given)]
        where = as_text(device, Argument("device"))
        return (yield from tracked(progress, partial(tensors.put, arrays, lease, where)))

    def get(
        self,
        handle: TensorHandle,
        *,
        release: bool = False,
        out: Any = None,
        progress: Callable[[int, int], object] | bool | None = None,
    ) -> Operation[NDArray[Any]]:
        """Reads a stored array.

        Args:
            handle: The handle of the array.
            release: Whether to delete the array from the server once it is read.
            out: An array of the same dtype and shape to read it into: one of NumPy, or one of any library in the memory
                of a GPU. A server that computes on this GPU writes to it there; see docs/gpu_arrays.md.
            progress: Told how far the transfer is; see `put`.

        Returns:
            A new array; `out` if that was given.

        Raises:
            NotFoundError: The array does not exist.
            InvalidArgumentError: `out` has another dtype or shape, or cannot be written to, or `progress` cannot be
                called.
        """
        known = as_handle(handle, Argument("handle"))
        if out is not None:
            place = _place_for(known, out, Argument("out"))
            yield from tracked(progress, partial(tensors.get_into, [known], [place], release=release))
            filled: NDArray[Any] = out
            return filled
        (array,) = yield from tracked(progress, partial(tensors.get, [known], release=release))
        return array

    def get_all(
        self,
        handles: Sequence[TensorHandle],
        *,
        release: bool = False,
        out: Sequence[Any] | None = None,
        progress: Callable[[int, int], object] | bool | None = None,
    ) -> Operation[list[NDArray[Any]]]:
        """Reads several stored arrays in one stream.

        Args:
            handles: The handles of the arrays.
            release: Whether to delete the arrays from the server once they are read.
            out: Arrays to read them into, one for each handle; see `get`.
            progress: Told how far the transfer of all of them is; see `put`.

        Returns:
            New arrays, in the order of the handles; the arrays of `out` if that was given.

        Raises:
            NotFoundError: One of the arrays does not exist.
            InvalidArgumentError: See `get`.
        """
        known = as_handles(as_list(handles, "a list of TensorHandles", Argument("handles")), "handles")
        if out is None:
            return (yield from tracked(progress, partial(tensors.get, known, release=release)))
        given = as_list(out, "a list of arrays", Argument("out"))
        if len(given) != len(known):
            raise Argument("out").error_saying(f"one array for each of the {len(known)} handles", str(len(given)))
        places = [
            _place_for(handle, place, Argument(f"out[{index}]"))
            for index, (handle, place) in enumerate(zip(known, given, strict=True))
        ]
        yield from tracked(progress, partial(tensors.get_into, known, places, release=release))
        return given

    def delete(self, *handles: TensorHandle) -> Operation[int]:
        """Deletes stored arrays.

        Args:
            *handles: The handles of the arrays. Arrays that no longer exist are ignored.

        Returns:
            The number of arrays that existed.
        """
        return tensors.delete(as_handles(handles, "handles"))

    def list_tensors(self) -> Operation[list[TensorHandle]]:
        """Lists the arrays that any client has stored on the server, oldest first.

        Returns:
            The handles, with dtypes and shapes.
        """
        return tensors.list_stored()


def _place_for(handle: TensorHandle, out: object, argument: Argument) -> Array | GpuArray:
    """Returns an array to which a stored one can be written.

    Raises:
        InvalidArgumentError: It is none, or has another dtype or shape.
    """
    place = as_output(out, argument)
    if (place.dtype, place.shape) != (handle.dtype, handle.shape):
        raise argument.error_saying(
            f"an array of shape {list(handle.shape)} and {handle.dtype}", f"{list(place.shape)} and {place.dtype}"
        )
    return place
