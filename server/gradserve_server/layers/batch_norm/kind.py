"""Batch normalization as a kind of layers."""

from collections.abc import Callable
from dataclasses import replace

from gradserve_server.devices.compute import Compute
from gradserve_server.layers.batch_norm.config import BatchNormConfig
from gradserve_server.layers.batch_norm.differences import describe_differences
from gradserve_server.layers.batch_norm.journal import LayerJournal, LayerRecords
from gradserve_server.layers.batch_norm.layer import BatchNormLayer
from gradserve_server.ops.runner import OpRunner
from gradserve_server.resources.memory import DeviceMemory
from gradserve_server.resources.quotas import Quota
from gradserve_server.resources.registry import ResourceKey

REMEMBERED_FORWARDS = 4096
"""The number of latest forwards whose fate a layer remembers."""


class BatchNormKind:
    """Makes batch normalization layers."""

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
        records: LayerRecords,
        remembered: int = REMEMBERED_FORWARDS,
        device: DeviceMemory | None = None,
    ) -> None:
        """Takes the parts that the layers share.

        Args:
            runner: What runs their computations.
            compute: What runs their initializers.
            memory: The quota of bytes.
            handles: The quota of forwards that they keep.
            clock: A monotonic clock, in seconds.
            new_id: A source of unique ids.
            new_seed: A source of seeds.
            records: What makes the journals of the layers.
            remembered: The number of latest forwards whose fate each layer remembers.
            device: The memory of the device; None if ops run on the host.
        """
        self._runner = runner
        self._compute = compute
        self._memory = memory
        self._handles = handles
        self._clock = clock
        self._new_id = new_id
        self._new_seed = new_seed
        self._records = records
        self._remembered = remembered
        self._device = device

    def check(self, config: BatchNormConfig) -> None:
        """Checks a configuration.

        Raises:
            InvalidArgumentError: A value is invalid, or two values contradict each other.
        """
        config.check()

    def differences(self, layer: BatchNormLayer, config: BatchNormConfig) -> str:
        """Returns how a layer differs from one with this configuration; seeds and durability only if given."""
        return describe_differences(layer.config, config.with_choices_of(layer.config))

    def make(
        self, key: ResourceKey, config: BatchNormConfig, creation_id: str, on_presence: Callable[[bool], object]
    ) -> BatchNormLayer:
        """Returns a new layer, with seeds and a durability chosen where none were given.

        Args:
            key: The layer's name.
            config: A checked configuration.
            creation_id: The id of the call.
            on_presence: Called with True when the layer begins to keep forwards, with False when it keeps none.

        Raises:
            InvalidArgumentError: The layer cannot be so durable here.
            ResourceExhaustedError: There is no memory for the values in the configuration.
        """
        config = config.with_seeds(self._new_seed)
        if config.durability is None:
            config = replace(config, durability=self._records.default)
        incarnation = self._new_id()
        journal = self._records.journal(key, config, incarnation, creation_id)
        return self.make_again(key, config, incarnation, creation_id, journal, on_presence)

    def make_again(
        self,
        key: ResourceKey,
        config: BatchNormConfig,
        incarnation: str,
        creation_id: str,
        journal: LayerJournal,
        on_presence: Callable[[bool], object],
    ) -> BatchNormLayer:
        """Returns a layer that was there before, without variables and forwards yet; for the arguments see `make`.

        Raises:
            ResourceExhaustedError: There is no memory for the values in the configuration.
        """
        return BatchNormLayer(
            key.name,
            config,
            incarnation=incarnation,
            creation_id=creation_id,
            runner=self._runner,
            compute=self._compute,
            memory=self._memory,
            handles=self._handles,
            clock=self._clock,
            new_id=self._new_id,
            journal=journal,
            remembered=self._remembered,
            on_presence=on_presence,
            creator=key.user,
            container=key.container,
            device=self._device,
        )

    async def settle(self) -> None:
        """Returns when others may see that layers were created or deleted."""
        await self._records.settle()
