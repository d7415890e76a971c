"""The calls of clients, as their users see them.

The signatures and docstrings here are those of the blocking and of the asyncio class.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from numpy.typing import ArrayLike, DTypeLike, NDArray

from gradserve.batch_norm_arguments import Initializer, RandomAdjustment, Regularizer
from gradserve.batch_norm_results import BatchNormLayerInfo
from gradserve.calls import tensors
from gradserve.calls.accumulator_wire import AccumulatorOptions, list_accumulators
from gradserve.calls.accumulator_wire import delete as delete_accumulator
from gradserve.calls.accumulators import (
    ConditionalAccumulatorCalls,
    GradientAccumulatorCalls,
    SparseConditionalAccumulatorCalls,
)
from gradserve.calls.batch_norm_config import BatchNormArguments
from gradserve.calls.batch_norm_layer import BatchNormLayerCalls
from gradserve.calls.batch_norm_layer_creation import LayerPlace, make_layer
from gradserve.calls.batch_norm_layer_wire import delete_layer, list_layers
from gradserve.calls.components import Components
from gradserve.calls.exchange import Operation, check_timeout
from gradserve.calls.identity import RequestIds
from gradserve.calls.made_accumulators import MadeAccumulators
from gradserve.calls.made_layers import MadeLayers
from gradserve.calls.private_resources import PrivateResources
from gradserve.calls.raw_ops import RawOpsCalls
from gradserve.calls.server import server_info
from gradserve.conversion.argument import Argument
from gradserve.conversion.arrays import as_array
from gradserve.conversion.handles import as_handle, as_handles
from gradserve.conversion.plain import as_list, as_text
from gradserve.conversion.trees import Tree
from gradserve.errors import GradserveError
from gradserve.results import AccumulatorInfo, DenseSpec, ServerInfo, Shape, SparseSpec, TensorHandle, TensorLike
from gradserve.v1 import accumulator_pb2
from gradserve.v1 import batch_norm_layer_pb2 as batch_norm_pb2


class ClientCalls:
    """Calls of `Client`."""

    def __init__(self, ids: RequestIds, timeout: float) -> None:
        self._ids = ids
        self._timeout = check_timeout(timeout)
        self._private = PrivateResources(ids)
        self._accumulators = MadeAccumulators(ids, self._private)
        self._layers = MadeLayers()
        self.raw_ops = RawOpsCalls(ids, self._timeout, self._accumulators)

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
        one_per_worker: bool = False,
        refuse_non_finite: bool = False,
        idle_lease: float | None = None,
    ) -> Operation[ConditionalAccumulatorCalls]:
        """Creates an accumulator of dense gradients, or finds the one of this shared name.

        Args:
            dtype: float16, bfloat16, float32 or float64.
            shape: Of every gradient; None as a dimension, or instead of all, where unknown. () is a scalar.
            shared_name: Under which other clients find it, until somebody deletes it. None: it is this client's own.
                The server deletes it when this client is closed; when its process has ended in another way, or its
                network is gone, somewhat later (after `client_lease` of `server_info().limits`, 60 s).
            name: How one without a shared name is called in lists.
            reduction_type: "MEAN" or "SUM".
            container: Namespace of the shared name; empty for the default one.
            accumulate_dtype: Type of the running sum. None: float32 for 16-bit gradients, else `dtype`. `dtype`
                itself rounds at each addition, as TensorFlow does.
            deterministic: Add up in the order of workers: the same bits, whatever order gradients come in.
            keep_averages: For how many past rounds the average can be read.
            one_per_worker: Count only the first gradient of each worker in a round, not, as TensorFlow does, every one.
                (`push_pull` does so anyway.)
            refuse_non_finite: Refuse gradients with infinite values or NaN, with an InvalidArgumentError that says
                where the first one is; otherwise they are averaged as all others.
            idle_lease: Seconds without use after which the server deletes it; None: never. Every call is a use that
                concerns this accumulator, of any client, also while it waits; lists are not.

        Raises:
            InvalidArgumentError: One of them cannot be.
            AlreadyExistsError: The name is taken by one with other properties; says which.
        """
        options = AccumulatorOptions(
            reduction_type,
            container,
            accumulate_dtype,
            deterministic,
            keep_averages,
            one_per_worker,
            refuse_non_finite,
            idle_lease,
        )
        wire = yield from self._accumulators.create(
            name, shared_name, Components.of_one_tensor(DenseSpec(dtype, shape)), options
        )
        return ConditionalAccumulatorCalls(wire, self._timeout)

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
        one_per_worker: bool = False,
        refuse_non_finite: bool = False,
        idle_lease: float | None = None,
    ) -> Operation[SparseConditionalAccumulatorCalls]:
        """Creates an accumulator of sparse gradients, or finds the one of this shared name.

        `shape` is that of the whole tensor. For all else see `conditional_accumulator`.
        """
        options = AccumulatorOptions(
            reduction_type,
            container,
            accumulate_dtype,
            deterministic,
            keep_averages,
            one_per_worker,
            refuse_non_finite,
            idle_lease,
        )
        wire = yield from self._accumulators.create(
            name, shared_name, Components.of_one_tensor(SparseSpec(dtype, shape)), options
        )
        return SparseConditionalAccumulatorCalls(wire, self._timeout)

    def gradient_accumulator(
        self,
        components: Tree,
        shared_name: str | None = None,
        name: str = "gradient_accumulator",
        reduction_type: str = "MEAN",
        *,
        container: str = "",
        accumulate_dtype: DTypeLike | None = None,
        deterministic: bool = False,
        keep_averages: int = 1,
        one_per_worker: bool = False,
        refuse_non_finite: bool = False,
        idle_lease: float | None = None,
        missing: Literal["error", "zeros"] = "error",
    ) -> Operation[GradientAccumulatorCalls]:
        """Creates an accumulator of whole models' gradients, or finds the one of this shared name.

        Args:
            components: The parameters of the model, or what has their dtypes and shapes: a dict by name, or a tree of
                dicts, lists, tuples and named tuples, as JAX's pytrees. A leaf is an array of any library, a handle,
                numbers in lists, a DenseSpec or a SparseSpec; its way names its component, such as "layers/0/w". None
                has no component.
            shared_name: See `conditional_accumulator`, as for all but the last.
            name: How one without a shared name is called in lists.
            reduction_type: "MEAN" or "SUM".
            container: Namespace of the shared name.
            accumulate_dtype: Type of the running sums.
            deterministic: Add up in the order of workers.
            keep_averages: For how many past rounds the average can be read.
            one_per_worker: Count only the first gradient of each worker in a round.
            refuse_non_finite: Refuse gradients with NaN or an infinity.
            idle_lease: Seconds without use after which the server deletes it; None: never.
            missing: What becomes of a gradient that this object is given without a component, or with None for it:
                "error", or "zeros", which are sent in its place, and count in the mean as others do.

        Raises:
            InvalidArgumentError: One of them cannot be.
            AlreadyExistsError: The name is taken by one with other properties; says which.
        """
        options = AccumulatorOptions(
            reduction_type,
            container,
            accumulate_dtype,
            deterministic,
            keep_averages,
            one_per_worker,
            refuse_non_finite,
            idle_lease,
        )
        wire = yield from self._accumulators.create(name, shared_name, Components.of_tree(components, missing), options)
        return GradientAccumulatorCalls(wire, self._timeout)

    def list_accumulators(self, container: str = "") -> Operation[list[AccumulatorInfo]]:
        """Describes all accumulators of a container."""
        return list_accumulators(container)

    def delete_accumulator(self, name: str, container: str = "") -> Operation[bool]:
        """Deletes an accumulator by its name, for all clients: calls that wait on it end with AbortedError.

        Args:
            name: The shared name, or the name that `list_accumulators` has.
            container: Its namespace; empty for the default one.

        Returns:
            False when there was none.
        """
        ref = accumulator_pb2.AccumulatorRef(
            container=as_text(container, Argument("container")), name=as_text(name, Argument("name"))
        )
        deleted = yield from delete_accumulator(ref)
        self._private.deleted(ref.name)
        return deleted

    def batch_norm(
        self,
        decay: float = 0.999,
        center: bool = True,
        scale: bool = False,
        epsilon: float = 0.001,
        activation_fn: str | None = None,
        param_initializers: Mapping[str, TensorLike | Initializer | str | None] | None = None,
        param_regularizers: Mapping[str, Regularizer | None] | None = None,
        updates_collections: str | Sequence[str] | None = "update_ops",
        reuse: bool | None = None,
        variables_collections: str | Sequence[str] | Mapping[str, str | Sequence[str]] | None = None,
        outputs_collections: str | Sequence[str] | None = None,
        trainable: bool = True,
        fused: bool | None = None,
        data_format: str = "NHWC",
        zero_debias_moving_mean: bool = False,
        scope: str | None = None,
        renorm: bool = False,
        renorm_clipping: Mapping[str, float] | None = None,
        renorm_decay: float = 0.99,
        adjustment: RandomAdjustment | None = None,
        *,
        container: str = "",
        renorm_zero_debias: bool = False,
        input_shape: Shape | None = None,
        dtype: DTypeLike | None = None,
        idle_lease: float | None = None,
    ) -> Operation[BatchNormLayerCalls]:
        """Creates a batch normalization layer, tf.contrib.layers.batch_norm, or finds the one of this scope.

        `inputs`, `is_training` and `batch_weights` are arguments of the layer's calls. C is the number of channels.
        The first forward creates the variables, for the dtype and the channels of its inputs. An
        IgnoredArgumentWarning says which arguments have no effect.

        Args:
            decay: Of the moving averages: each update moves them by 1 - decay of the way to the batch.
            center: Add beta.
            scale: Multiply by gamma.
            epsilon: Added to the variance before the root is taken.
            activation_fn: The name of what is applied to the result: "relu", "relu6", "tanh", "sigmoid", "elu",
                "selu", "softplus", "softsign", "leaky_relu", "gelu" or "swish", as in tf.nn. None, or "none": nothing.
            param_initializers: First values of "beta", "gamma", "moving_mean" and "moving_variance": an array of
                shape [C], an Initializer, or the name of one. Not named: zeros (beta, moving_mean) or ones.
            param_regularizers: Of "beta" and "gamma". Their losses are results of `forward`, and their gradients of
                `backward`.
            updates_collections: Names by which `run_updates` of the client finds the layer. None: a forward in
                training updates the moving averages itself. Another name than "update_ops" makes TensorFlow, and so
                gradserve, choose another implementation.
            reuse: None: create or find. True: it must exist. False: it must not.
            variables_collections: Tags of the variables: for all, or by variable. `list_batch_norm_layers` can ask
                for a tag.
            outputs_collections: Tags of the outputs, likewise.
            trainable: Whether beta and gamma are listed as trainable.
            fused: Whether to use the fused implementation where it is possible. None: yes.
            data_format: "NHWC": the channels are the last axis; "NCHW": axis 1; for inputs of rank 2 to 5.
            zero_debias_moving_mean: Correct the moving mean for its start at zero.
            scope: Under which other clients find it, until somebody deletes it. None: it is this client's own. The
                server deletes it when this client is closed; when its process has ended in another way, or its network
                is gone, somewhat later (after `client_lease` of `server_info().limits`, 60 s).
            renorm: Batch Renormalization (https://arxiv.org/abs/1702.03275).
            renorm_clipping: Bounds of its corrections: "rmax", "rmin", "dmax". One that is not named does not bound.
            renorm_decay: Decay of its averages.
            adjustment: Draws an adjustment for each forward in training. Tensors go to the call instead.
            container: Namespace of the scope; empty for the default one.
            renorm_zero_debias: Renormalization as it was up to TensorFlow 1.12, whose averages start at zero.
            input_shape: Of inputs, None or -1 where unknown, but for the channels; with `dtype`, the variables are
                created at once.
            dtype: Of such inputs: float16, bfloat16, float32 or float64.
            idle_lease: Seconds without use after which the server deletes it; None: never. Every call is a use that
                concerns this layer, of any client; lists, and updates of a whole collection, are not.

        Raises:
            InvalidArgumentError: One of them cannot be, or they cannot be together.
            AlreadyExistsError: The scope is taken by a layer with other arguments, says which; or at all, with
                reuse=False.
            NotFoundError: There is none, with reuse=True.
            ResourceExhaustedError: Too many layers, or no memory for the variables.
        """
        arguments = BatchNormArguments(
            decay=decay,
            center=center,
            scale=scale,
            epsilon=epsilon,
            activation_fn=activation_fn,
            param_initializers=param_initializers,
            param_regularizers=param_regularizers,
            updates_collections=updates_collections,
            variables_collections=variables_collections,
            outputs_collections=outputs_collections,
            trainable=trainable,
            fused=fused,
            data_format=data_format,
            zero_debias_moving_mean=zero_debias_moving_mean,
            renorm=renorm,
            renorm_clipping=renorm_clipping,
            renorm_decay=renorm_decay,
            adjustment=adjustment,
            renorm_zero_debias=renorm_zero_debias,
        )
        where = LayerPlace(container, scope, reuse, idle_lease, input_shape, dtype)
        return make_layer(arguments, where, self._ids, self._layers, self._private)

    def list_batch_norm_layers(
        self, container: str = "", scope: str = "", collection: str = ""
    ) -> Operation[list[BatchNormLayerInfo]]:
        """Describes the batch normalization layers of a container, by name.

        Args:
            container: Empty for the default one.
            scope: Only those whose name begins so, as tf.get_collection has it. Empty: all.
            collection: Only those that have it among updates_collections, outputs_collections or
                variables_collections. Empty: all.
        """
        names = {"container": container, "scope": scope, "collection": collection}
        return list_layers(**{name: as_text(value, Argument(name)) for name, value in names.items()})

    def delete_batch_norm_layer(self, scope: str, container: str = "") -> Operation[bool]:
        """Deletes a batch normalization layer by its scope, with its variables and forwards, for all clients.

        Args:
            scope: Its scope, or the name that `list_batch_norm_layers` has.
            container: Its namespace; empty for the default one.

        Returns:
            False when there was none.
        """
        ref = batch_norm_pb2.BatchNormLayerRef(
            container=as_text(container, Argument("container")), name=as_text(scope, Argument("scope"))
        )
        deleted = yield from delete_layer(ref)
        self._private.deleted(ref.name)
        return deleted

    def run_updates(self, collection: str = "update_ops", container: str = "") -> Operation[int]:
        """Runs all updates that wait, of all layers with this name among their updates_collections.

        Those of all clients, each forward once; see `BatchNormLayer.run_updates` for one layer's. Safe to repeat.

        Args:
            collection: The name; "update_ops" unless a layer was told otherwise.
            container: Of the layers; empty for the default one.

        Returns:
            Of how many forwards the updates were run now.
        """
        return self._layers.run_updates(
            as_text(container, Argument("container")), as_text(collection, Argument("collection"))
        )

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

    def server_info(self) -> Operation[ServerInfo]:
        """Describes the server: version, devices, limits, load."""
        return server_info()

    def delete_private(self) -> Operation[None]:
        """Deletes what was made without a shared name or scope, as far as the server can be reached."""
        with contextlib.suppress(GradserveError):
            yield from self._private.delete_all()
