"""The calls of a batch normalization layer, as users see them.

The blocking and the asyncio class take their signatures and docstrings from here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradserve.batch_norm import BatchNormForward, BatchNormGradients, BatchNormLayerInfo
from gradserve.calls.arguments import IgnoredArguments, arguments_named, as_op_input
from gradserve.calls.batch_norm.wire import (
    BatchNormLayerWire,
    ForwardOptions,
    Forwards,
    UnusedForward,
    in_requests,
    receive_forward,
    receive_gradients,
)
from gradserve.calls.exchange import Operation
from gradserve.calls.identity import RequestIds
from gradserve.calls.tensors import OpInput
from gradserve.conversion.plain import as_flag, as_list, as_mapping, as_text
from gradserve.conversion.tensors import as_array_of
from gradserve.results import Tensor, TensorHandle, TensorLike
from gradserve_protocol.argument import Argument, described
from gradserve_protocol.arrays import DType
from gradserve_protocol.errors import (
    AbortedError,
    CallCancelledError,
    DeadlineExceededError,
    GradserveError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
)
from gradserve_protocol.tensors import to_dtype
from gradserve_protocol.v1 import batch_norm_layer_messages_pb2 as messages_pb2

_FLOAT32, _FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)
_UNKNOWN_OUTCOMES = (UnavailableError, DeadlineExceededError, InternalError, CallCancelledError)
"""Errors after which the server may have carried out the call. Any other error means that nothing has changed."""


class BatchNormLayerCalls:
    """Calls of `BatchNormLayer`."""

    def __init__(
        self,
        wire: BatchNormLayerWire,
        ids: RequestIds,
        ignored: IgnoredArguments,
        *,
        is_private: bool,
        deleted: Callable[[str], object],
    ) -> None:
        """Keeps `deleted`, which is called with the layer's name once the layer was deleted."""
        self._wire = wire
        self._ids = ids
        self._ignored = ignored
        self._is_private = is_private
        self._deleted = deleted
        self._forwards = Forwards()

    @property
    def name(self) -> str:
        """The layer's name on the server: the scope."""
        return self._wire.ref.name

    @property
    def container(self) -> str:
        """The namespace of the layer's name."""
        return self._wire.ref.container

    @property
    def description(self) -> str:
        """The layer's container and name."""
        return f"{self.container}/{self.name}"

    def __call__(
        self,
        inputs: TensorLike,
        is_training: bool = True,
        batch_weights: TensorLike | None = None,
        adjustment: tuple[TensorLike, TensorLike] | None = None,
        keep: bool = False,
    ) -> Operation[Tensor]:
        """Normalises inputs and returns only the outputs; see `forward`.

        In training, the server keeps what `backward` needs until this object is called like this again. To keep several
        forwards at once, or to call the layer from several threads, use `forward`.

        Args:
            inputs: See `forward`.
            is_training: See `forward`.
            batch_weights: See `forward`.
            adjustment: See `forward`.
            keep: Whether to leave the outputs on the server and return their handle.

        Returns:
            The outputs, of the dtype and shape of the inputs.

        Raises:
            GradserveError: See `forward`.
        """
        tensors = _tensors(inputs, batch_weights, adjustment)
        is_trained = as_flag(is_training, Argument("is_training"))
        options = ForwardOptions(
            forward_id=self._ids.name(),
            is_training=is_trained,
            keep_for_backward=None,
            lease=None,
            released=tuple(self._forwards.useless(replacing=is_trained)),
        )
        forward = yield from self._forward(tensors, options, keep=keep, is_call=True, is_named=False)
        return forward.outputs

    def forward(
        self,
        inputs: TensorLike,
        is_training: bool = True,
        batch_weights: TensorLike | None = None,
        adjustment: tuple[TensorLike, TensorLike] | None = None,
        keep: bool = False,
        *,
        keep_for_backward: bool | None = None,
        lease: float | None = None,
        forward_id: str | None = None,
    ) -> Operation[BatchNormForward[Tensor]]:
        """Normalises inputs over all axes but the channels. The first forward creates the layer's variables.

        N is the first size of the inputs, C the number of channels. An input is an array of any library, numbers, or
        the handle of a tensor on the server.

        A forward in training updates the moving averages: at once with updates_collections=None, otherwise when
        `run_updates` is called. It does so once, even if the client has to send the call again.

        Args:
            inputs: The values to normalise: float16, bfloat16, float32 or float64, of rank 2 to 5. Numbers become
                float32.
            is_training: Whether to normalise by the moments of the inputs; otherwise by the moving averages.
            batch_weights: The weight of each item in the moments: shape [N], a floating dtype, integers or bool.
                Numbers become float32, or float64 if the inputs are.
            adjustment: A pair (scale, bias). In training, the normalised values are multiplied by the scale and added
                to the bias, before gamma and beta. Each has a floating dtype (numbers as in batch_weights) and a shape
                that broadcasts to the inputs' as in NumPy: shape [C] is along the channels with "NHWC" only.
            keep: Whether to leave the outputs on the server; the result then has their handle.
            keep_for_backward: Whether to keep on the server what `backward` needs. None: only in training.
            lease: Seconds that the forward, and outputs left on the server, live there without use. None: the server's
                default.
            forward_id: A unique name for this forward, such as a random UUID. After an UnavailableError or
                DeadlineExceededError, the call can be made again with the same name: the forward counts once, whatever
                became of the first call. None: the client makes a name.

        Returns:
            The outputs, and the forward itself for `backward` and `run_updates`.

        Raises:
            InvalidArgumentError: An input does not fit; `field` names it. Nothing has changed.
            NotFoundError: The layer was deleted, or a handle's tensor does not exist.
            ResourceExhaustedError: The results, or what is kept, do not fit into the server's memory. Nothing has
                changed.
        """
        name = "" if forward_id is None else as_text(forward_id, Argument("forward_id"))
        is_kept = None if keep_for_backward is None else as_flag(keep_for_backward, Argument("keep_for_backward"))
        return self._forward(
            _tensors(inputs, batch_weights, adjustment),
            ForwardOptions(
                forward_id=name or self._ids.name(),
                is_training=as_flag(is_training, Argument("is_training")),
                keep_for_backward=is_kept,
                lease=lease,
                released=tuple(self._forwards.useless(replacing=False)),
            ),
            keep=keep,
            is_call=False,
            is_named=bool(name),
        )

    def backward(
        self,
        dy: TensorLike,
        forward: BatchNormForward[Any] | None = None,
        *,
        retain: bool = False,
        keep: bool = False,
        lease: float | None = None,
    ) -> Operation[BatchNormGradients[Tensor]]:
        """Computes the gradients of a forward with respect to everything that it was computed from.

        They are computed with the values that the forward used, whatever has changed since.

        Args:
            dy: The gradient with respect to the outputs, of their dtype and shape. Numbers become that dtype.
            forward: The forward, also one of another object of the same layer. None: this object's newest forward whose
                gradients can be computed and have not been; with several threads, pass the forward.
            retain: Whether to keep what another `backward` of this forward needs. Otherwise this is the last one.
            keep: Whether to leave the gradients on the server; the result then has their handles.
            lease: Seconds that gradients left on the server live there without use. None: the server's default.

        Returns:
            The gradients.

        Raises:
            InvalidArgumentError: There is no such forward, or `dy` has another dtype or shape; the forward is kept.
            NotFoundError: The forward is unknown or its lease has ended (the error's `field` is "forward_id"), the
                tensor of the handle `dy` does not exist ("outputs_gradient.handle"; the forward is kept), or the layer
                was deleted ("layer.name").
            AbortedError: The forward's gradients were computed already, or it was released. Without `retain`, also if
                the reply was lost and the client sent the call again: the results are lost, the layer is unharmed.
            ResourceExhaustedError: The gradients do not fit into the server's memory.
        """
        forward_id, dtype = self._differentiable(forward)
        gradient = as_op_input(dy, dtype, "dy", field="outputs_gradient")
        is_retained = as_flag(retain, Argument("retain"))
        try:
            with arguments_named({"outputs_gradient": "dy"}):
                reply = yield from self._wire.backward(forward_id, gradient, retain=is_retained, keep=keep, lease=lease)
        except (AbortedError, NotFoundError) as error:
            if error.field == "forward_id":  # else the handle of dy, or the layer, does not exist
                self._forwards.let_go([forward_id])
            raise
        if not is_retained:
            self._forwards.let_go([forward_id])
        return (yield from receive_gradients(reply, keep=keep))

    def run_updates(self, forwards: Sequence[BatchNormForward[Any] | str] | None = None) -> Operation[int]:
        """Updates the moving averages with forwards in training, as TensorFlow's update ops do.

        Each forward counts once, so it is safe to repeat. `Client.run_updates` updates all layers of a collection.

        Args:
            forwards: The forwards, in the order in which they update; forwards of other clients by the forward_id that
                these chose. None: all forwards of this object with pending updates, in their order; the newest 65,536
                if there are more.

        Returns:
            The number of forwards whose updates were run now. Nothing is sent if there are none.

        Raises:
            NotFoundError: The layer was deleted.
        """
        if forwards is None:
            forward_ids = self._forwards.pending()
        else:
            given = as_list(forwards, "a list of forwards", Argument("forwards"))
            forward_ids = [forward_id for each in given if (forward_id := _updatable(each))]
        num_run = 0
        for part in in_requests(forward_ids):
            num_run += yield from self._wire.run_updates(part)
            self._forwards.updated(part)
        return num_run

    def release(self, *forwards: BatchNormForward[Any]) -> Operation[int]:
        """Releases what the server keeps for forwards: for their gradients, and for their pending updates.

        Args:
            *forwards: The forwards. Those that no longer exist are ignored.

        Returns:
            The number of forwards that still existed.

        Raises:
            NotFoundError: The layer was deleted.
        """
        forward_ids = [forward_id for each in forwards if (forward_id := _forward_of(each, "forwards").forward_id)]
        num_released = 0
        for part in in_requests(forward_ids):
            num_released += yield from self._wire.release(part, keep_updates=False)
            self._forwards.forget(part)
        return num_released

    def get_variables(self, *names: str) -> Operation[dict[str, NDArray[Any]]]:
        """Reads variables, all as of one moment.

        Args:
            *names: The names: "beta", "gamma", "moving_mean", "moving_variance", and if the layer has them
                "moving_mean/biased", "moving_mean/local_step", "moving_stddev", "renorm_mean", "renorm_stddev",
                "renorm_mean_weight" and "renorm_stddev_weight". Without names: all variables.

        Returns:
            The values by name, each of shape [C], except local_step and the weights, which are scalars. Empty if all
            are asked for before the variables are created.

        Raises:
            NotFoundError: The layer has no variable of a name, or not yet; or it was deleted.
        """
        return self._wire.get_variables([as_text(name, Argument("names")) for name in names])

    def set_variables(self, values: Mapping[str, TensorLike]) -> Operation[None]:
        """Sets variables, all at once or none.

        Args:
            values: The new values by name, each of the shape of its variable: an array of any library or numbers,
                converted to the variable's dtype, or the handle of a tensor of that dtype on the server.

        Raises:
            InvalidArgumentError: A value has another shape or is not numeric, or there are no values.
            NotFoundError: The layer has no variable of a name, or not yet; or it was deleted.
        """
        given = as_mapping(values, Argument("values"))
        dtypes = yield from self._wire.dtypes(list(given))
        variables = {name: _variable(name, value, dtypes.get(name)) for name, value in given.items()}
        with arguments_named({f"variables[{index}]": name for index, name in enumerate(variables)}):
            yield from self._wire.set_variables(variables)

    def describe(self, collection: str = "") -> Operation[BatchNormLayerInfo]:
        """Describes the layer as it is now: its arguments, its variables, and its pending work.

        Args:
            collection: A name among variables_collections: only variables with it are described. Empty: all.

        Returns:
            A snapshot; it does not change with the layer.

        Raises:
            NotFoundError: The layer was deleted.
        """
        return self._wire.describe(as_text(collection, Argument("collection")))

    def delete(self) -> Operation[bool]:
        """Deletes the layer with its variables and forwards, for all clients.

        Returns:
            Whether it still existed.
        """
        deleted = yield from self._wire.delete()
        self._deleted(self.name)
        self._forwards.forget_all()
        return deleted

    def leave(self) -> Operation[None]:
        """Ends the use of this object, if the server can be reached.

        Deletes a layer without a scope. Of a layer with a scope, releases what the server keeps for the gradients of
        this object's forwards; their updates can still be run.
        """
        with contextlib.suppress(GradserveError):
            if self._is_private:
                yield from self.delete()
                return
            for part in in_requests(self._forwards.outstanding()):
                yield from self._wire.release(part, keep_updates=True)
                self._forwards.let_go(part)

    def pending(self, container: str, collection: str) -> list[str]:
        """Returns the forwards with pending updates, if this layer's updates belong to this collection."""
        is_one_of_them = container == self.container and collection in self._wire.updates_collections
        return self._forwards.pending() if is_one_of_them else []

    def updated(self, forward_ids: Sequence[str]) -> None:
        """Forgets pending updates that were run."""
        self._forwards.updated(forward_ids)

    def _forward(
        self,
        inputs: Mapping[str, OpInput],
        options: ForwardOptions,
        *,
        keep: bool,
        is_call: bool,
        is_named: bool,
    ) -> Operation[BatchNormForward[Tensor]]:
        """Computes a forward.

        Args:
            inputs: The input tensors by name.
            options: The options of the forward.
            keep: Whether to leave the outputs on the server.
            is_call: Whether it is made by `__call__`, so that the next such call takes its place.
            is_named: Whether the caller chose its id and may repeat the call if it fails. Otherwise a failed one is
                lost.
        """
        try:
            with arguments_named():
                reply = yield from self._wire.forward(inputs, options, keep=keep)
        except BaseException as error:  # also when cancelled
            if not is_named and (not isinstance(error, GradserveError) or isinstance(error, _UNKNOWN_OUTCOMES)):
                self._forwards.add_lost(options.forward_id)
            raise
        self._forwards.let_go(options.released)
        self._remember(reply.message, options, replaceable=is_call)
        try:
            forward = yield from receive_forward(reply, keep=keep)
            self._ignored.warn(forward.warnings)
        except BaseException:
            if not is_named:
                self._forwards.add_lost(options.forward_id)
            raise
        return forward

    def _remember(
        self, reply: messages_pb2.BatchNormForwardResponse, options: ForwardOptions, *, replaceable: bool
    ) -> None:
        kept = options.is_training if options.keep_for_backward is None else options.keep_for_backward
        if kept and reply.forward_id:
            dtype = to_dtype(reply.outputs.dtype)
            self._forwards.add_unused(UnusedForward(reply.forward_id, dtype, replaceable))
        if reply.has_pending_updates:
            self._forwards.add_pending(reply.forward_id)

    def _differentiable(self, forward: BatchNormForward[Any] | None) -> tuple[str, DType]:
        if forward is not None:
            forward_id = _forward_of(forward, "forward").forward_id
            if forward_id is None:
                raise InvalidArgumentError(
                    f"nothing was kept of this forward of layer {self.name!r} to compute gradients from; it was "
                    "computed with is_training=False or keep_for_backward=False",
                    field="forward_id",
                )
            return forward_id, forward.outputs.dtype
        newest = self._forwards.newest_unused()
        if newest is None:
            raise InvalidArgumentError(
                f"expected a forward of layer {self.name!r} before its gradients; there was none since the last "
                "backward, or it was computed with is_training=False",
                field="forward_id",
            )
        return newest.forward_id, newest.dtype


def _forward_of(value: object, name: str) -> BatchNormForward[Any]:
    if not isinstance(value, BatchNormForward):
        raise Argument(name).error("a BatchNormForward", value)
    return value


def _updatable(forward: BatchNormForward[Any] | str) -> str | None:
    """Returns the id of a forward whose updates may wait."""
    if isinstance(forward, str):
        return as_text(forward, Argument("forwards"))
    forward = _forward_of(forward, "forwards")
    return forward.forward_id if forward.has_pending_updates else None


def _tensors(
    inputs: TensorLike, batch_weights: TensorLike | None, adjustment: tuple[TensorLike, TensorLike] | None
) -> dict[str, OpInput]:
    tensors = {"inputs": as_op_input(inputs, _FLOAT32, "inputs")}
    dtype = _FLOAT64 if tensors["inputs"].dtype == _FLOAT64 else _FLOAT32
    if batch_weights is not None:
        tensors["batch_weights"] = as_op_input(batch_weights, dtype, "batch_weights")
    if adjustment is not None:
        if not isinstance(adjustment, tuple | list) or len(adjustment) != 2:
            raise Argument("adjustment").error_saying("a pair of tensors, (scale, bias),", _counted(adjustment))
        scale, bias = adjustment
        tensors["adjustment_scale"] = as_op_input(scale, dtype, "adjustment_scale")
        tensors["adjustment_bias"] = as_op_input(bias, dtype, "adjustment_bias")
    return tensors


def _counted(value: object) -> str:
    """Returns how many values a sequence has, or the description of anything else."""
    return f"{len(value)} values" if isinstance(value, tuple | list) else described(value)


def _variable(name: str, value: TensorLike, dtype: DType | None) -> OpInput:
    if isinstance(value, TensorHandle) or dtype is None:  # the server says that there is no such variable
        return as_op_input(value, _FLOAT32, f"variable {name!r}", field="variables")
    return as_array_of(dtype, value, Argument(f"variable {name!r}", "variables"))
