# Made by deploy/generate_face_types.py; do not edit.

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self, overload
from numpy.typing import NDArray
from gradserve import BatchNormForward, BatchNormGradients, BatchNormLayerInfo, Tensor, TensorHandle, TensorLike
from gradserve.calls.batch_norm.layer import BatchNormLayerCalls
from gradserve.face import AsyncFace

class BatchNormLayer(AsyncFace[BatchNormLayerCalls]):
    @property
    def name(self) -> str:
        """The layer's name on the server: the scope."""
    @property
    def container(self) -> str:
        """The namespace of the layer's name."""
    def __repr__(self) -> str:
        """"""
    async def __aenter__(self) -> Self:
        """"""
    async def __aexit__(self, *exception: object) -> None:
        """"""
    @overload
    async def __call__(self, inputs: TensorLike, is_training: bool = True, batch_weights: TensorLike | None = None, adjustment: tuple[TensorLike, TensorLike] | None = None, keep: Literal[False] = False) -> NDArray[Any]:
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
    @overload
    async def __call__(self, inputs: TensorLike, is_training: bool = True, batch_weights: TensorLike | None = None, adjustment: tuple[TensorLike, TensorLike] | None = None, *, keep: Literal[True]) -> TensorHandle: ...
    @overload
    async def __call__(self, inputs: TensorLike, is_training: bool = True, batch_weights: TensorLike | None = None, adjustment: tuple[TensorLike, TensorLike] | None = None, keep: bool = False) -> Tensor: ...
    @overload
    async def forward(self, inputs: TensorLike, is_training: bool = True, batch_weights: TensorLike | None = None, adjustment: tuple[TensorLike, TensorLike] | None = None, keep: Literal[False] = False, *, keep_for_backward: bool | None = None, lease: float | None = None, forward_id: str | None = None) -> BatchNormForward[NDArray[Any]]:
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
    @overload
    async def forward(self, inputs: TensorLike, is_training: bool = True, batch_weights: TensorLike | None = None, adjustment: tuple[TensorLike, TensorLike] | None = None, *, keep: Literal[True], keep_for_backward: bool | None = None, lease: float | None = None, forward_id: str | None = None) -> BatchNormForward[TensorHandle]: ...
    @overload
    async def forward(self, inputs: TensorLike, is_training: bool = True, batch_weights: TensorLike | None = None, adjustment: tuple[TensorLike, TensorLike] | None = None, keep: bool = False, *, keep_for_backward: bool | None = None, lease: float | None = None, forward_id: str | None = None) -> BatchNormForward[Tensor]: ...
    @overload
    async def backward(self, dy: TensorLike, forward: BatchNormForward[Any] | None = None, *, retain: bool = False, keep: Literal[False] = False, lease: float | None = None) -> BatchNormGradients[NDArray[Any]]:
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
    @overload
    async def backward(self, dy: TensorLike, forward: BatchNormForward[Any] | None = None, *, retain: bool = False, keep: Literal[True], lease: float | None = None) -> BatchNormGradients[TensorHandle]: ...
    @overload
    async def backward(self, dy: TensorLike, forward: BatchNormForward[Any] | None = None, *, retain: bool = False, keep: bool = False, lease: float | None = None) -> BatchNormGradients[Tensor]: ...
    async def run_updates(self, forwards: Sequence[BatchNormForward[Any] | str] | None = None) -> int:
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
    async def release(self, *forwards: BatchNormForward[Any]) -> int:
        """Releases what the server keeps for forwards: for their gradients, and for their pending updates.

        Args:
            *forwards: The forwards. Those that no longer exist are ignored.

        Returns:
            The number of forwards that still existed.

        Raises:
            NotFoundError: The layer was deleted.
        """
    async def get_variables(self, *names: str) -> dict[str, NDArray[Any]]:
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
    async def set_variables(self, values: Mapping[str, TensorLike]) -> None:
        """Sets variables, all at once or none.

        Args:
            values: The new values by name, each of the shape of its variable: an array of any library or numbers,
                converted to the variable's dtype, or the handle of a tensor of that dtype on the server.

        Raises:
            InvalidArgumentError: A value has another shape or is not numeric, or there are no values.
            NotFoundError: The layer has no variable of a name, or not yet; or it was deleted.
        """
    async def describe(self, collection: str = '') -> BatchNormLayerInfo:
        """Describes the layer as it is now: its arguments, its variables, and its pending work.

        Args:
            collection: A name among variables_collections: only variables with it are described. Empty: all.

        Returns:
            A snapshot; it does not change with the layer.

        Raises:
            NotFoundError: The layer was deleted.
        """
    async def delete(self) -> bool:
        """Deletes the layer with its variables and forwards, for all clients.

        Returns:
            Whether it still existed.
        """
