"""What a kind of layers has to do, to be created, found and looked after."""

from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np

from gradserve_server.resources import ResourceKey


class Layer(Protocol):
    """A layer of any kind."""

    @property
    def incarnation(self) -> str:
        """Tells it from another one that had the name before."""
        ...

    @property
    def creation_id(self) -> str:
        """That of the call that created it, if it had one."""
        ...

    @property
    def collections(self) -> Collection[str]:
        """The tags to list it by."""
        ...

    @property
    def updates_collections(self) -> Collection[str]:
        """The tags to run its updates by."""
        ...

    async def build(self, dtype: np.dtype[Any], shape: Sequence[int]) -> None:
        """Creates the variables for inputs like these, or checks that they fit; sizes may be -1 for any.

        Raises:
            InvalidArgumentError: The layer does not take such inputs.
            ResourceExhaustedError: There is no memory for them.
        """
        ...

    async def run_updates(self, forward_ids: Sequence[str]) -> int:
        """Runs updates that wait, each once: of these forwards, or of all; returns how many were run now."""
        ...

    async def expire(self) -> int:
        """Forgets forwards whose lease has run out; returns how many."""
        ...

    def close(self) -> None:
        """Lets go of everything."""
        ...


LayerT = TypeVar("LayerT", bound=Layer)
ConfigT = TypeVar("ConfigT")
ConfigT_contra = TypeVar("ConfigT_contra", contravariant=True)


class LayerKind(Protocol[ConfigT_contra, LayerT]):
    """What tells layers of one kind from those of others."""

    @property
    def first_variable(self) -> str:
        """The name of the variable that TensorFlow creates first, and complains of."""
        ...

    def check(self, config: ConfigT_contra) -> None:
        """Checks a configuration.

        Raises:
            InvalidArgumentError: A value cannot be, or two of them contradict each other.
        """
        ...

    def differences(self, layer: LayerT, config: ConfigT_contra) -> str:
        """Returns in what a layer differs from one with this configuration, in words; nothing if in nothing."""
        ...

    def make(
        self, key: ResourceKey, config: ConfigT_contra, creation_id: str, on_presence: Callable[[bool], object]
    ) -> LayerT:
        """Returns a new layer.

        Args:
            key: Its name.
            config: One that was checked.
            creation_id: Of the call.
            on_presence: Told when the layer begins or ceases to keep forwards.

        Raises:
            ResourceExhaustedError: There is no memory for the values in the configuration.
        """
        ...
