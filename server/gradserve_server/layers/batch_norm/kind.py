"""Batch normalization as a kind of layers."""

from collections.abc import Callable

from gradserve_server.devices.compute import Compute
from gradserve_server.layers.batch_norm.config import BatchNormConfig
from gradserve_server.layers.batch_norm.differences import describe_differences
from gradserve_server.layers.batch_norm.events import Event
from gradserve_server.layers.batch_norm.layer import BatchNormLayer
from gradserve_server.ops.runner import OpRunner
from gradserve_server.resources import ResourceKey
from gradserve_server.state.journal import Journal, NoJournal
from gradserve_server.tensors.quotas import Quota

REMEMBERED_FORWARDS = 4096
"""The number of latest forwards of which a layer remembers whether they were counted."""


class BatchNormKind:
    """Makes layers that normalise batches."""

    first_variable = "beta"

    def __init__(
        self,
        *,
        runner: OpRunner,
        compute: Compute,
        memory: Quota,
        handles: Quota,
        clock: Callable[[], float],
        new_id: Callable[[], str],
        new_seed: Callable[[], int],
        journal_of: Callable[[ResourceKey], Journal[Event]] = lambda _: NoJournal(),
        remembered: int = REMEMBERED_FORWARDS,
    ) -> None:
        """Takes what they are made with.

        Args:
            runner: Runs their computations.
            compute: Runs their initializers.
            memory: Bytes.
            handles: One for each forward that they keep.
            clock: Monotonic, in seconds.
            new_id: A source of unique ids.
            new_seed: A source of seeds.
            journal_of: Makes each a journal.
            remembered: The number of latest forwards of which each remembers whether they were counted.
        """
        self._runner = runner
        self._compute = compute
        self._memory = memory
        self._handles = handles
        self._clock = clock
        self._new_id = new_id
        self._new_seed = new_seed
        self._journal_of = journal_of
        self._remembered = remembered

    def check(self, config: BatchNormConfig) -> None:
        """Checks a configuration.

        Raises:
            InvalidArgumentError: A value cannot be, or two of them contradict each other.
        """
        config.check()

    def differences(self, layer: BatchNormLayer, config: BatchNormConfig) -> str:
        """Returns in what a layer differs from one with this configuration; seeds that were not given are the same."""
        return describe_differences(layer.config, config.with_seeds_of(layer.config))

    def make(
        self, key: ResourceKey, config: BatchNormConfig, creation_id: str, on_presence: Callable[[bool], object]
    ) -> BatchNormLayer:
        """Returns a new layer, with seeds drawn where they were not given.

        Args:
            key: Its name.
            config: One that was checked.
            creation_id: Of the call.
            on_presence: Told when the layer begins or ceases to keep forwards.

        Raises:
            ResourceExhaustedError: There is no memory for the values in the configuration.
        """
        return BatchNormLayer(
            key.name,
            config.with_seeds(self._new_seed),
            incarnation=self._new_id(),
            creation_id=creation_id,
            runner=self._runner,
            compute=self._compute,
            memory=self._memory,
            handles=self._handles,
            clock=self._clock,
            new_id=self._new_id,
            journal=self._journal_of(key),
            remembered=self._remembered,
            on_presence=on_presence,
        )
