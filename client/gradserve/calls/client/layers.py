"""The client's calls about layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gradserve.batch_norm import BatchNormLayerInfo, Initializer, RandomAdjustment, Regularizer
from gradserve.calls.batch_norm.config import BatchNormArguments
from gradserve.calls.batch_norm.creation import LayerPlace, make_layer
from gradserve.calls.batch_norm.layer import BatchNormLayerCalls
from gradserve.calls.batch_norm.wire import delete_layer, list_layers
from gradserve.calls.client.state import ClientState
from gradserve.calls.exchange import Operation
from gradserve.conversion.plain import as_text
from gradserve.results import DTypeLike, Shape, TensorLike
from gradserve_protocol.argument import Argument
from gradserve_protocol.v1 import batch_norm_layer_pb2 as batch_norm_pb2


class LayersOfClient(ClientState):
    """Makes, lists and deletes layers, and runs their updates."""

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
        durability: str | None = None,
    ) -> Operation[BatchNormLayerCalls]:
        """Creates a batch normalization layer, tf.contrib.layers.batch_norm, or finds the one with this scope.

        TensorFlow's arguments `inputs`, `is_training` and `batch_weights` are passed to the layer's calls instead. The
        first forward, as a call of the layer is named here, creates the variables for the dtype and the number of
        channels C of its inputs. An IgnoredArgumentWarning names arguments that have no effect.

        Args:
            decay: The decay of the moving averages: each update moves them by 1 - decay of the way to the batch.
            center: Whether to add beta.
            scale: Whether to multiply by gamma.
            epsilon: The number added to the variance before the root is taken.
            activation_fn: The name of the function applied to the result, as in tf.nn: "relu", "relu6", "tanh",
                "sigmoid", "elu", "selu", "softplus", "softsign", "leaky_relu", "gelu" or "swish". None, or "none": no
                function.
            param_initializers: The initial values of "beta", "gamma", "moving_mean" and "moving_variance": an array of
                shape [C], an Initializer, or the name of one. Otherwise zeros (beta, moving_mean) or ones.
            param_regularizers: Regularizers of "beta" and "gamma". `forward` returns their losses, `backward` the
                losses' gradients.
            updates_collections: The names by which the client's `run_updates` finds the layer. None: a forward in
                training updates the moving averages itself. With a name other than "update_ops", TensorFlow, and so
                gradserve, chooses another implementation.
            reuse: None: create or find the layer. True: it must exist. False: it must not exist.
            variables_collections: Names of collections for the variables: for all, or by variable.
                `list_batch_norm_layers` can filter by them.
            outputs_collections: Names of collections for the outputs, likewise.
            trainable: Whether beta and gamma are listed as trainable.
            fused: Whether to use the fused implementation where possible. None: yes.
            data_format: "NHWC": the channels are the last axis. "NCHW": they are axis 1. For inputs of rank 2 to 5.
            zero_debias_moving_mean: Whether to correct the moving mean for its start at zero.
            scope: The name by which other clients find the layer, which then lives until it is deleted. None: it is
                private and deleted with this client: on `close`, or if the client dies or its network fails, after
                `client_lease` of `server_info().limits`, 60 seconds by default.
            renorm: Whether to use Batch Renormalization (https://arxiv.org/abs/1702.03275).
            renorm_clipping: The bounds of its corrections: "rmax", "rmin", "dmax". A missing one means no bound.
            renorm_decay: The decay of its averages.
            adjustment: A random adjustment, drawn for each forward in training. Pass tensors to the layer's calls
                instead.
            container: The namespace of the scope. Empty: the default one.
            renorm_zero_debias: Whether to renormalize as TensorFlow up to 1.12 does, whose averages start at zero.
            input_shape: The shape of inputs, with None or -1 for unknown dimensions; the channels must be known. With
                `dtype`, the variables are created at once.
            dtype: The dtype of such inputs: float16, bfloat16, float32 or float64.
            idle_lease: Seconds without use after which the server deletes the layer. None: never. Calls on it by any
                client count as use; listing, and updates of a whole collection, do not.
            durability: What survives a crash of a server with a state directory: "none"; or "round" or "gradient",
                which are the same for layers: the variables, pending updates, and which forwards have counted, from
                before a call that changes them returns. None: what the server was started with.

        Returns:
            The layer.

        Raises:
            InvalidArgumentError: An argument is not valid, or arguments do not go together.
            AlreadyExistsError: The scope is taken by a layer with other arguments, and the message says which; or, with
                reuse=False, by any layer.
            NotFoundError: With reuse=True, the layer does not exist.
            ResourceExhaustedError: The server has reached its limit of layers, or has no memory for the variables.
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
            durability=durability,
        )
        where = LayerPlace(container, scope, reuse, idle_lease, input_shape, dtype)
        return make_layer(arguments, where, self._ids, self._layers, self._lease)

    def list_batch_norm_layers(
        self, container: str = "", scope: str = "", collection: str = ""
    ) -> Operation[list[BatchNormLayerInfo]]:
        """Describes the batch normalization layers of a container, sorted by name.

        Args:
            container: The namespace. Empty: the default one.
            scope: A prefix: only layers whose name begins with it, as in tf.get_collection. Empty: all.
            collection: A name: only layers that have it among updates_collections, outputs_collections or
                variables_collections. Empty: all.

        Returns:
            The descriptions. Each is a snapshot.
        """
        names = {"container": container, "scope": scope, "collection": collection}
        return list_layers(**{name: as_text(value, Argument(name)) for name, value in names.items()})

    def delete_batch_norm_layer(self, scope: str, container: str = "") -> Operation[bool]:
        """Deletes a batch normalization layer by its scope, with its variables and forwards, for all clients.

        Args:
            scope: The scope, or the name in `list_batch_norm_layers`.
            container: The namespace of the scope. Empty: the default one.

        Returns:
            Whether it existed.
        """
        ref = batch_norm_pb2.BatchNormLayerRef(
            container=as_text(container, Argument("container")), name=as_text(scope, Argument("scope"))
        )
        deleted = yield from delete_layer(ref)
        self._lease.deleted(ref.name)
        return deleted

    def run_updates(self, collection: str = "update_ops", container: str = "") -> Operation[int]:
        """Runs the pending updates of all layers with this name among their updates_collections.

        Runs the updates of all clients' forwards, each once, so it is safe to repeat. `BatchNormLayer.run_updates`
        updates one layer.

        Args:
            collection: The name of the collection: "update_ops" unless a layer was made with another.
            container: The namespace of the layers. Empty: the default one.

        Returns:
            The number of forwards whose updates were run now.
        """
        return self._layers.run_updates(
            as_text(container, Argument("container")), as_text(collection, Argument("collection"))
        )
