"""The layers of a server, by container and name."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from enum import Enum, auto
from functools import partial
from typing import Any

import numpy as np

from gradserve_server.config import LimitsConfig
from gradserve_server.devices.compute import Compute
from gradserve_server.errors import AlreadyExistsError, InvalidArgumentError, NotFoundError, ServiceError
from gradserve_server.layers.batch_norm.config import MAX_NAME_BYTES, BatchNormConfig
from gradserve_server.layers.batch_norm.differences import describe_differences
from gradserve_server.layers.batch_norm.events import Event
from gradserve_server.layers.batch_norm.layer import BatchNormLayer
from gradserve_server.leases.lifetime import SHARED, Lifetime
from gradserve_server.leases.lifetimes import Lifetimes
from gradserve_server.ops.runner import OpRunner
from gradserve_server.resources import Directory, ResourceKey
from gradserve_server.state.journal import Journal, NoJournal
from gradserve_server.tensors.quotas import Quota

_log = logging.getLogger(__name__)

REMEMBERED_FORWARDS = 4096
"""The number of latest forwards of which a layer remembers whether they were counted."""
_MAX_ID_BYTES = 128
_LOOKED_AT_ONCE = 512
"""Layers, before others get their turn."""


class Reuse(Enum):
    """Says whether a layer of the name may, must or must not exist."""

    ALLOWED = auto()
    REQUIRED = auto()
    FORBIDDEN = auto()


class LayerRegistry:
    """Creates, finds and deletes layers.

    Not thread-safe: used on the event loop only.
    """

    def __init__(
        self,
        *,
        runner: OpRunner,
        compute: Compute,
        memory: Quota,
        handles: Quota,
        limits: LimitsConfig,
        lifetimes: Lifetimes,
        clock: Callable[[], float],
        new_id: Callable[[], str],
        new_seed: Callable[[], int],
        journal_of: Callable[[ResourceKey], Journal[Event]] = lambda _: NoJournal(),
        remembered: int = REMEMBERED_FORWARDS,
    ) -> None:
        """Takes what layers are made with, and what counts them.

        Args:
            runner: Runs their computations.
            compute: Runs their initializers.
            memory: Bytes.
            handles: One for each forward that they keep.
            limits: How many there may be.
            lifetimes: What ends them.
            clock: Monotonic, in seconds.
            new_id: A source of unique ids.
            new_seed: A source of seeds.
            journal_of: Makes each a journal.
            remembered: The number of latest forwards of which a layer remembers whether they were counted.
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
        self._layers: Directory[BatchNormLayer] = Directory("layer", lifetimes, self._delete, article="a")
        # Those that have forwards left: mostly few of many.
        self._keeping: dict[ResourceKey, BatchNormLayer] = {}
        self.count = Quota(limits.max_layers, "layers")

    def create(
        self,
        key: ResourceKey,
        config: BatchNormConfig,
        reuse: Reuse,
        creation_id: str,
        lifetime: Lifetime = SHARED,
    ) -> tuple[BatchNormLayer, bool]:
        """Returns the layer of this name, and whether it is new.

        Raises:
            InvalidArgumentError: The name is empty, a name or the id is too long, or the configuration cannot be.
            AlreadyExistsError: There is one with another configuration or lifetime, or one at all where that is
                forbidden.
            NotFoundError: There is none where one is required.
            ResourceExhaustedError: There are too many.
        """
        found = self._existing(key, config, reuse, creation_id, lifetime)
        if found is not None:
            return found, False
        layer = self._new(key, config, creation_id)
        self._layers.add(key, layer, lifetime, layer.config.collections)
        return layer, True

    async def create_built(
        self,
        key: ResourceKey,
        config: BatchNormConfig,
        reuse: Reuse,
        creation_id: str,
        dtype: np.dtype[Any],
        shape: Sequence[int],
        lifetime: Lifetime = SHARED,
    ) -> tuple[BatchNormLayer, bool]:
        """Returns the layer of this name with its variables, and whether it is new; nobody finds it without them.

        Args:
            key: Its name.
            config: Its configuration.
            reuse: Whether it may exist.
            creation_id: Of the call.
            dtype: Of its inputs.
            shape: Of its inputs, -1 where a size is not known.
            lifetime: What ends it.

        Raises:
            InvalidArgumentError: As for `create`; or the layer does not take such inputs.
            AlreadyExistsError: As for `create`.
            NotFoundError: As for `create`.
            ResourceExhaustedError: There are too many, or there is no memory for the variables.
        """
        found = self._existing(key, config, reuse, creation_id, lifetime)
        if found is None:
            layer = self._new(key, config, creation_id)
            try:
                await layer.build(dtype, shape)
                # Somebody else may have been faster.
                found = self._existing(key, config, reuse, creation_id, lifetime)
                if found is None:
                    self._layers.add(key, layer, lifetime, layer.config.collections)
                    return layer, True
            except BaseException:
                self._close(layer)
                raise
            self._close(layer)
        with self._layers.use(key, found.incarnation):
            await found.build(dtype, shape)
        return found, False

    def _existing(
        self, key: ResourceKey, config: BatchNormConfig, reuse: Reuse, creation_id: str, lifetime: Lifetime
    ) -> BatchNormLayer | None:
        """Returns the layer of this name, nothing if one is to be created; raises what `create` does."""
        if reuse is Reuse.REQUIRED and not key.name:
            raise InvalidArgumentError(
                "reuse=True cannot be used without a name_or_scope; expected the name of a layer", field="layer.name"
            )
        found = self._layers.find(key)
        _check_length(key.container, MAX_NAME_BYTES, "layer.container")
        _check_length(key.name, MAX_NAME_BYTES, "layer.name")
        _check_length(creation_id, _MAX_ID_BYTES, "creation_id")
        config.check()
        if found is None:
            if reuse is Reuse.REQUIRED:
                raise NotFoundError(
                    f"Variable {key.name}/beta does not exist: there is no layer {str(key)!r}, and reuse is True. "
                    "Expected the name of one, or reuse=None",
                    field="layer.name",
                )
            return None
        is_retry = bool(creation_id) and creation_id == found.creation_id
        if reuse is Reuse.FORBIDDEN and not is_retry:
            raise AlreadyExistsError(
                f"Variable {key.name}/beta already exists, disallowed: there is a layer {str(key)!r}, and reuse is "
                "False. Did you mean to set reuse=True or None?",
                field="layer.name",
            )
        differences = describe_differences(found.config, config.with_seeds_of(found.config))
        if differences:
            raise AlreadyExistsError(
                f"layer {str(key)!r} exists with another configuration: {differences}", field="config"
            )
        self._layers.check_lifetime(key, lifetime)
        self._layers.renew(key)
        return found

    def get(self, key: ResourceKey, incarnation: str = "") -> BatchNormLayer:
        """Returns the layer of this name, and of this incarnation if one is given.

        Raises:
            InvalidArgumentError: The name is empty.
            NotFoundError: There is none.
        """
        return self._layers.get(key, incarnation)

    def use(self, key: ResourceKey, incarnation: str = "") -> AbstractContextManager[BatchNormLayer]:
        """Finds a layer as `get` does, and keeps it from ending by itself while a call uses it."""
        return self._layers.use(key, incarnation)

    def lifetime(self, key: ResourceKey) -> Lifetime:
        """Returns what ends a layer that is there."""
        return self._layers.lifetime(key)

    def delete(self, key: ResourceKey, incarnation: str = "") -> bool:
        """Deletes a layer; tells whether there was one.

        Raises:
            InvalidArgumentError: The name is empty.
        """
        return self._delete(key, incarnation)

    def _delete(self, key: ResourceKey, incarnation: str, reason: str | None = None) -> bool:
        layer = self._layers.remove(key, incarnation, reason)
        if layer is None:
            return False
        self._close(layer)
        return True

    def page(
        self, container: str, after: str, size: int, *, scope: str, collection: str
    ) -> list[tuple[ResourceKey, BatchNormLayer]]:
        """Returns up to `size` layers of a container whose names come after `after`, by name.

        Args:
            container: Their namespace.
            after: Empty for the first page.
            size: How many at most.
            scope: What their names begin with.
            collection: A tag that they have; empty for any.
        """
        return self._layers.page(container, after, size, prefix=scope, tag=collection)

    async def run_updates(self, container: str, collection: str, forward_ids: Sequence[str]) -> int:
        """Runs the updates of all layers of a container that have a collection for them; see `BatchNormLayer`."""
        count = 0
        for index, (key, layer) in enumerate(list(self._keeping.items())):
            if index % _LOOKED_AT_ONCE == 0:
                await asyncio.sleep(0)
            if key.container == container and collection in layer.config.updates_collections:
                await asyncio.sleep(0)
                count += await layer.run_updates(forward_ids)
        return count

    async def expire(self) -> int:
        """Forgets forwards whose lease has run out; returns how many."""
        count = 0
        for key, layer in list(self._keeping.items()):
            try:
                count += await layer.expire()
            except ServiceError as error:
                # Its journal refuses. Nothing has happened, and it is due the next time.
                _log.warning("the forwards of layer %s did not expire: %s", key, error)
        return count

    def _new(self, key: ResourceKey, config: BatchNormConfig, creation_id: str) -> BatchNormLayer:
        self.count.acquire()
        try:
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
                on_presence=partial(self._note_forwards, key),
            )
        except BaseException:
            self.count.release()
            raise

    def _note_forwards(self, key: ResourceKey, is_keeping: bool) -> None:
        if is_keeping:
            self._keeping[key] = self._layers.get(key)
        else:
            self._keeping.pop(key, None)

    def _close(self, layer: BatchNormLayer) -> None:
        self.count.release()
        layer.close()


def _check_length(text: str, limit: int, field: str) -> None:
    num_bytes = len(text.encode())
    if num_bytes > limit:
        raise InvalidArgumentError(f"expected at most {limit} bytes, got {num_bytes}", field=field)
