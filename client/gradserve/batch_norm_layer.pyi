# Made by deploy/generate_face_types.py; do not edit.

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self, overload
from numpy.typing import NDArray
from gradserve import BatchNormForward, BatchNormGradients, BatchNormLayerInfo, Tensor, TensorHandle, TensorLike
from gradserve.calls.batch_norm.layer import BatchNormLayerCalls
from gradserve.face import BlockingFace

class BatchNormLayer(BlockingFace[BatchNormLayerCalls]):
    @property
    def name(self) -> str:
        """Its name on the server: the scope."""
    @property
    def container(self) -> str:
        """The namespace of its name."""
    @property
    def variables(self) -> dict[str, NDArray[Any]]:
        """All variables by name, read from the server; see `get_variables`."""
    def __repr__(self) -> str:
        """"""
    def __enter__(self) -> Self:
        """"""
    def __exit__(self, *exception: object) -> None:
        """"""
    @overload
    def __call__(self, inputs: TensorLike, is_training: bool = True, batch_weights: TensorLike | None = None, adjustment: tuple[TensorLike, TensorLike] | None = None, keep: Literal[False] = False) -> NDArray[Any]:
        """Normalises inputs: `forward`, for those who only want the outputs.

        In training, what the gradients need is kept on the server for `backward`, until the next such call of this
        object, which takes this one's place. To have several at once, or to call the layer from several threads, use
        `forward`.

        Args:
            inputs: As in `forward`.
            is_training: As in `forward`.
            batch_weights: As in `forward`.
            adjustment: As in `forward`.
            keep: Leave the outputs on the server and return their handle.

        Returns:
            The outputs, of the dtype and shape of the inputs.

        Raises:
            GradserveError: As `forward`.
        """
    @overload
    def __call__(self, inputs: TensorLike, is_training: bool = True, batch_weights: TensorLike | None = None, adjustment: tuple[TensorLike, TensorLike] | None = None, *, keep: Literal[True]) -> TensorHandle: ...
    @overload
    def __call__(self, inputs: TensorLike, is_training: bool = True, batch_weights: TensorLike | None = None, adjustment: tuple[TensorLike, TensorLike] | None = None, keep: bool = False) -> Tensor: ...
    @overload
    def forward(self, inputs: TensorLike, is_training: bool = True, batch_weights: TensorLike | None = None, adjustment: tuple[TensorLike, TensorLike] | None = None, keep: Literal[False] = False, *, keep_for_backward: bool | None = None, lease: float | None = None, forward_id: str | None = None) -> BatchNormForward[NDArray[Any]]:
        """Normalises inputs over all axes but the channels. The first forward creates the layer's variables.

        N is the first size of the inputs, C the number of channels. An input is an array of any library, numbers, or
        the handle of a tensor on the server.

        A forward in training updates the moving averages: at once with updates_collections=None, else when
        `run_updates` is called. Either happens once, also when the network makes the client send the call again.

        Args:
            inputs: What to normalise: float16, bfloat16, float32 or float64, of rank 2 to 5. Numbers become float32.
            is_training: Whether to normalise by the moments of the inputs, or else by the moving averages.
            batch_weights: The weight of each item in the moments: shape [N], a floating dtype, integers or bool.
                Numbers become float32, or float64 when the inputs are.
            adjustment: (scale, bias). In training, what is normalised is multiplied by the scale and added to the bias,
                before gamma and beta. Each is of a floating dtype (numbers as in batch_weights) and of a shape that
                broadcasts to that of the inputs, as in NumPy: one of shape [C] is along the channels with "NHWC" only.
            keep: Leave the outputs on the server: in the result they are a handle.
            keep_for_backward: Keep on the server what `backward` needs. None: when training.
            lease: How many seconds the forward, and outputs left on the server, live there without use. None: the
                server's default.
            forward_id: A unique name for this forward, such as a random UUID. A call that ended with an
                UnavailableError or DeadlineExceededError can be made again under the same name: it then counts once,
                whatever became of the first. None: the client makes a name.

        Returns:
            The outputs, and the forward for `backward` and `run_updates`.

        Raises:
            InvalidArgumentError: An input does not fit; `field` says which. Nothing has changed.
            NotFoundError: The layer was deleted, or a handle's tensor does not exist (any more).
            ResourceExhaustedError: The results, or what is kept, do not fit into the server's memory. Nothing has
                changed.
        """
    @overload
    def forward(self, inputs: TensorLike, is_training: bool = True, batch_weights: TensorLike | None = None, adjustment: tuple[TensorLike, TensorLike] | None = None, *, keep: Literal[True], keep_for_backward: bool | None = None, lease: float | None = None, forward_id: str | None = None) -> BatchNormForward[TensorHandle]: ...
    @overload
    def forward(self, inputs: TensorLike, is_training: bool = True, batch_weights: TensorLike | None = None, adjustment: tuple[TensorLike, TensorLike] | None = None, keep: bool = False, *, keep_for_backward: bool | None = None, lease: float | None = None, forward_id: str | None = None) -> BatchNormForward[Tensor]: ...
    @overload
    def backward(self, dy: TensorLike, forward: BatchNormForward[Any] | None = None, *, retain: bool = False, keep: Literal[False] = False, lease: float | None = None) -> BatchNormGradients[NDArray[Any]]:
        """Computes the gradients of a forward with respect to everything that it was computed from.

        They are computed with the values that the forward used, whatever has changed since.

        Args:
            dy: The gradient with respect to the outputs, of their dtype and shape. Numbers become that dtype.
            forward: The forward, also one of another object of the same layer. None: the newest forward of this object
                whose gradients can be computed and have not been yet; with several threads, say which.
            retain: Keep what is needed for another such call. Otherwise this is the last one.
            keep: Leave the gradients on the server: in the result they are handles.
            lease: How many seconds gradients left on the server live there without use. None: the server's default.

        Returns:
            The gradients.

        Raises:
            InvalidArgumentError: There is no such forward, or `dy` has another dtype or shape; the forward is kept.
            NotFoundError: The forward is unknown or its lease has ended ("forward_id" is the error's `field`), `dy` is
                the handle of a tensor that does not exist (any more) ("outputs_gradient.handle"; the forward is kept),
                or the layer was deleted ("layer.name").
            AbortedError: The forward's gradients were computed already, or it was released. Without `retain` also when
                the reply of this call was lost and it was sent again: the results are lost, the layer is unharmed.
            ResourceExhaustedError: The gradients do not fit into the server's memory.
        """
    @overload
    def backward(self, dy: TensorLike, forward: BatchNormForward[Any] | None = None, *, retain: bool = False, keep: Literal[True], lease: float | None = None) -> BatchNormGradients[TensorHandle]: ...
    @overload
    def backward(self, dy: TensorLike, forward: BatchNormForward[Any] | None = None, *, retain: bool = False, keep: bool = False, lease: float | None = None) -> BatchNormGradients[Tensor]: ...
    def run_updates(self, forwards: Sequence[BatchNormForward[Any] | str] | None = None) -> int:
        """Updates the moving averages by forwards in training, as TensorFlow's update ops do.

        Each forward counts once, so it is safe to repeat. `Client.run_updates` does it for all layers of a collection.

        Args:
            forwards: The forwards, in the order in which they update; also those of other clients, by the forward_id
                that they chose. None: all forwards of this object whose updates wait, in their order; of more than
                65,536 the newest.

        Returns:
            Of how many forwards the updates were run now. Nothing is sent when there is none.

        Raises:
            NotFoundError: The layer was deleted.
        """
    def release(self, *forwards: BatchNormForward[Any]) -> int:
        """Lets go of what the server keeps for forwards: their gradients, and their updates that were not run.

        Args:
            *forwards: The forwards. Those that are gone already do not matter.

        Returns:
            How many of them there were.

        Raises:
            NotFoundError: The layer was deleted.
        """
    def get_variables(self, *names: str) -> dict[str, NDArray[Any]]:
        """Reads variables, all of one moment.

        Args:
            *names: Which: "beta", "gamma", "moving_mean", "moving_variance", and as far as the layer has them
                "moving_mean/biased", "moving_mean/local_step", "moving_stddev", "renorm_mean", "renorm_stddev",
                "renorm_mean_weight" and "renorm_stddev_weight". None given: all.

        Returns:
            The values by name, each of shape [C], but local_step and the weights, which are scalars. Empty when all are
            asked for and the variables have not been created yet.

        Raises:
            NotFoundError: The layer has no variable of a name, or not yet; or it was deleted.
        """
    def set_variables(self, values: Mapping[str, TensorLike]) -> None:
        """Sets variables, all at once or none.

        Args:
            values: The new values by name, each of the shape of its variable: an array of any library or numbers, which
                are converted to the variable's dtype, or the handle of a tensor on the server that has it.

        Raises:
            InvalidArgumentError: A value has another shape, or is no numbers; or there is nothing to set.
            NotFoundError: The layer has no variable of a name, or not yet; or it was deleted.
        """
    def describe(self, collection: str = '') -> BatchNormLayerInfo:
        """Describes the layer as it is now: its arguments, its variables, and what waits.

        Args:
            collection: Describe only the variables that have it among their variables_collections. Empty: all.

        Returns:
            The description. It does not change with the layer.

        Raises:
            NotFoundError: The layer was deleted.
        """
    def delete(self) -> bool:
        """Deletes the layer with its variables and forwards, for all clients.

        Returns:
            Whether it was still there.
        """
