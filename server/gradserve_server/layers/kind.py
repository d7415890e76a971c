"""The interfaces of a layer and of a kind of layers, as the registry uses them."""

from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np

from gradserve_server.resources.lifetimes import Lifetime
from gradserve_server.resources.registry import ResourceKey


class Layer(Protocol):
    """A layer of any kind."""

    @property
    def incarnation(self) -> str:
        """The id that tells the layer from an earlier one of the same name."""
        ...

    @property
    def creation_id(self) -> str:
        """The creation_id of the call that created the layer; empty if it had none."""
        ...

    @property
    def collections(self) -> Collection[str]:
        """The tags by which the layer is listed."""
        ...

    @property
    def updates_collections(self) -> Collection[str]:
        """The tags by which its updates are run."""
        ...

    @property
    def bookkeeping_bytes(self) -> int:
        """The memory of its names and tags."""
        ...

    async def build(self, dtype: np.dtype[Any], shape: Sequence[int]) -> None:
        """Creates the variables for such inputs, or checks that they fit; a size of -1 stands for any.

        Raises:
            InvalidArgumentError: The layer does not accept such inputs.
            ResourceExhaustedError: There is no memory for the variables.
        """
        ...

    async def run_updates(self, forward_ids: Sequence[str]) -> int:
        """Runs the pending updates of these forwards, or of all, each once; returns how many it ran."""
        ...

    async def expire(self) -> int:
        """Forgets forwards whose lease has expired, or some of many; returns how many."""
        ...

    def begin(self, lifetime: Lifetime) -> None:
        """Notes that the layer can be found by its name from now on, until its lifetime ends it."""
        ...

    def close(self) -> None:
        """Releases everything the layer holds, for good."""
        ...


LayerT = TypeVar("LayerT", bound=Layer)
ConfigT = TypeVar("ConfigT")
ConfigT_contra = TypeVar("ConfigT_contra", contravariant=True)


class LayerKind(Protocol[ConfigT_contra, LayerT]):
    """A kind of layers: what the registry needs to check, compare and make them."""

    @property
    def first_variable(self) -> str:
        """The name of the variable that TensorFlow creates first, and names in its errors."""
        ...

    def check(self, config: ConfigT_contra) -> None:
        """Checks a configuration.

        Raises:
            InvalidArgumentError: A value is invalid, or two values contradict each other.
        """
        ...

    def differences(self, layer: LayerT, config: ConfigT_contra) -> str:
        """Returns how a layer differs from one with this configuration, in words; empty if it does not."""
        ...

    def make(
        self, key: ResourceKey, config: ConfigT_contra, creation_id: str, on_presence: Callable[[bool], object]
    ) -> LayerT:
        """Returns a new layer.

        Args:
            key: The layer's name.
            config: A checked configuration.
            creation_id: The id of the call.
            on_presence: Called with True when the layer begins to keep forwards, with False when it keeps none.

        Raises:
            InvalidArgumentError: The server cannot make such a layer.
            ResourceExhaustedError: There is no memory for the values in the configuration.
        """
        ...

    async def settle(self) -> None:
        """Returns when others may see that layers were created or deleted."""
        ...
