"""The client for ordinary code. `gradserve.aio` has the same with `await`."""

import contextlib
import uuid
from collections.abc import Mapping, Sequence
from typing import Self

from numpy.typing import ArrayLike, DTypeLike

from gradserve.accumulators import (
    ConditionalAccumulator,
    GradientAccumulator,
    SparseConditionalAccumulator,
)
from gradserve.calls import tensors
from gradserve.calls.accumulators import (
    AccumulatorCalls,
    AccumulatorOptions,
    ComponentSpec,
    create,
    list_accumulators,
)
from gradserve.calls.identity import RequestIds
from gradserve.calls.naming import component_specs, private_name
from gradserve.calls.server import server_info
from gradserve.errors import GradserveError
from gradserve.results import AccumulatorInfo, DenseSpec, ServerInfo, Shape, SparseSpec, TensorHandle
from gradserve.transport import SyncTransport
from gradserve.wire.payload import Array

DEFAULT_TIMEOUT_SECONDS = 60.0


def connect(address: str, *, timeout: float = DEFAULT_TIMEOUT_SECONDS) -> "Client":
    """Returns a client of the server at an address. Nothing is sent before the first call.

    Args:
        address: "HOST:PORT" or "unix:PATH".
        timeout: Seconds after which a call fails with DeadlineExceededError, and for which calls that wait for
            other workers wait, unless they are told otherwise.
    """
    return Client(address, timeout=timeout)


class Client:
    """A connection to a gradserve server. Safe to use from several threads, not across a fork."""

    def __init__(self, address: str, *, timeout: float = DEFAULT_TIMEOUT_SECONDS) -> None:
        """See `connect`."""
        self.address = address
        self._timeout = timeout
        self._transport = SyncTransport(address, timeout)
        self._ids = RequestIds(uuid.uuid4().hex)
        self._private: list[AccumulatorCalls] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Deletes the accumulators that this client made without a shared name, and disconnects."""
        for calls in self._private:
            with contextlib.suppress(GradserveError):
                self._transport.run(calls.delete())
        self._private.clear()
        self._transport.close()

    def conditional_accumulator(
        self,
        dtype: DTypeLike,
        shape: Shape | None = None,
        shared_name: str | None = None,
        name: str = "conditional_accumulator",
        reduction_type: str = "MEAN",
        *,
        container: str = "",
        accumulate_dtype: DTypeLike | None = None,
        deterministic: bool = False,
        keep_averages: int = 1,
    ) -> ConditionalAccumulator:
        """Creates an accumulator of dense gradients, or finds the one of this shared name.

        Args:
            dtype: float16, bfloat16, float32 or float64.
            shape: Of every gradient; None as a dimension, or instead of all, where unknown. () is a scalar.
            shared_name: Under which other clients find it. None: it is this client's own and ends with it.
            name: How one without a shared name is called in lists.
            reduction_type: "MEAN" or "SUM".
            container: Namespace of the shared name; empty for the default one.
            accumulate_dtype: Type of the running sum. None: float32 for 16-bit gradients, else `dtype`. `dtype`
                itself rounds at each addition, as TensorFlow does.
            deterministic: Add up in the order of workers: the same bits, whatever order gradients come in.
            keep_averages: For how many past rounds the average can be read.

        Raises:
            InvalidArgumentError: One of them cannot be.
            AlreadyExistsError: The name is taken by one with other properties; says which.
        """
        options = AccumulatorOptions(reduction_type, container, accumulate_dtype, deterministic, keep_averages)
        calls = self._create(name, shared_name, {"": DenseSpec(dtype, shape)}, options)
        return ConditionalAccumulator(self._transport, calls, self._timeout)

    def sparse_conditional_accumulator(
        self,
        dtype: DTypeLike,
        shape: Shape | None = None,
        shared_name: str | None = None,
        name: str = "sparse_conditional_accumulator",
        reduction_type: str = "MEAN",
        *,
        container: str = "",
        accumulate_dtype: DTypeLike | None = None,
        deterministic: bool = False,
        keep_averages: int = 1,
    ) -> SparseConditionalAccumulator:
        """Creates an accumulator of sparse gradients, or finds the one of this shared name.

        `shape` is that of the whole tensor. For all else see `conditional_accumulator`.
        """
        options = AccumulatorOptions(reduction_type, container, accumulate_dtype, deterministic, keep_averages)
        calls = self._create(name, shared_name, {"": SparseSpec(dtype, shape)}, options)
        return SparseConditionalAccumulator(self._transport, calls, self._timeout)

    def gradient_accumulator(
        self,
        components: Mapping[str, ArrayLike | ComponentSpec],
        shared_name: str | None = None,
        name: str = "gradient_accumulator",
        reduction_type: str = "MEAN",
        *,
        container: str = "",
        accumulate_dtype: DTypeLike | None = None,
        deterministic: bool = False,
        keep_averages: int = 1,
    ) -> GradientAccumulator:
        """Creates an accumulator of whole models' gradients, or finds the one of this shared name.

        Args:
            components: By name: an array that has the dtype and shape of its gradients (its values do not matter),
                a DenseSpec or a SparseSpec.
            shared_name: As all else, see `conditional_accumulator`.
            name: See there.
            reduction_type: See there.
            container: See there.
            accumulate_dtype: See there.
            deterministic: See there.
            keep_averages: See there.
        """
        options = AccumulatorOptions(reduction_type, container, accumulate_dtype, deterministic, keep_averages)
        calls = self._create(name, shared_name, component_specs(components), options)
        return GradientAccumulator(self._transport, calls, self._timeout)

    def list_accumulators(self, container: str = "") -> list[AccumulatorInfo]:
        """Describes all accumulators of a container."""
        return self._transport.run(list_accumulators(container))

    def put(self, value: ArrayLike, *, lease: float | None = None) -> TensorHandle:
        """Stores an array on the server, under a handle that whoever has it can use.

        Args:
            value: The array.
            lease: Seconds it lives without being used; None for the server's default.

        Raises:
            InvalidArgumentError: No tensor can have its dtype.
            ResourceExhaustedError: It does not fit.
        """
        return self.put_all([value], lease=lease)[0]

    def put_all(self, values: Sequence[ArrayLike], *, lease: float | None = None) -> list[TensorHandle]:
        """Stores several arrays in one stream, all or none."""
        return self._transport.run(tensors.put(values, lease))

    def get(self, handle: TensorHandle, *, release: bool = False) -> Array:
        """Reads a stored array; `release` deletes it then.

        Raises:
            NotFoundError: It does not exist (any more).
        """
        return self.get_all([handle], release=release)[0]

    def get_all(self, handles: Sequence[TensorHandle], *, release: bool = False) -> list[Array]:
        """Reads several stored arrays in one stream."""
        return self._transport.run(tensors.get(handles, release=release))

    def delete(self, *handles: TensorHandle) -> int:
        """Deletes stored arrays; returns how many of them there were."""
        return self._transport.run(tensors.delete(handles))

    def list_tensors(self) -> list[TensorHandle]:
        """Lists all stored arrays, oldest first."""
        return self._transport.run(tensors.list_stored())

    def server_info(self) -> ServerInfo:
        """Describes the server: version, devices, limits, load."""
        return self._transport.run(server_info())

    def _create(
        self,
        name: str,
        shared_name: str | None,
        components: Mapping[str, ComponentSpec],
        options: AccumulatorOptions,
    ) -> AccumulatorCalls:
        full_name = shared_name if shared_name is not None else private_name(name, self._ids)
        calls = self._transport.run(create(full_name, components, options, self._ids))
        if shared_name is None:
            self._private.append(calls)
        return calls
