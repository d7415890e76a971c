"""The layers of a server, by container and name."""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from enum import Enum, auto
from functools import partial
from typing import Any

import numpy as np

from gradserve_server.errors import AlreadyExistsError, InvalidArgumentError, NotFoundError, ServiceError
from gradserve_server.layers.batch_norm.config import BatchNormConfig, describe_differences
from gradserve_server.layers.batch_norm.journal import LayerJournal
from gradserve_server.layers.batch_norm.layer import BatchNormLayer, LayerEnvironment
from gradserve_server.limits import MAX_ID_BYTES, check_length
from gradserve_server.resources.budget import Budget, Reservation
from gradserve_server.resources.lifetimes import SHARED, Lifetime, Lifetimes
from gradserve_server.resources.registry import Directory, ResourceKey
from gradserve_server.runtime.event_loop import InTurns
from gradserve_server.security.identity import ANONYMOUS, Identity
from gradserve_server.storage.journal import durability_of_new

_log = logging.getLogger(__name__)

_FIRST_VARIABLE = "beta"
"""The variable that TensorFlow creates first, and names in its errors."""


class Reuse(Enum):
    """The condition on an existing layer of the same name: it may, must or must not exist."""

    ALLOWED = auto()
    REQUIRED = auto()
    FORBIDDEN = auto()


class LayerRegistry:
    """Creates, finds and deletes the layers of a server.

    Attributes:
        count: The budget of layers, and how many there are.

    Not thread-safe: used on the event loop only.
    """

    def __init__(
        self,
        environment: LayerEnvironment,
        count: Budget,
        lifetimes: Lifetimes,
        bookkeeping: Budget,
        is_of_another_run: Callable[[str], bool] = lambda _: False,
    ) -> None:
        """Creates an empty registry.

        Args:
            environment: What the layers share.
            count: The budget of layers.
            lifetimes: Ends the layers.
            bookkeeping: The budget of bytes for names and tags.
            is_of_another_run: Tells whether an earlier run of the server made the layer with this incarnation.
        """
        self._bookkeeping = bookkeeping
        self.count = count
        self._environment = environment
        self._layers: Directory[BatchNormLayer] = Directory("layer", lifetimes, self._delete, "a", is_of_another_run)
        self._reservations: dict[BatchNormLayer, tuple[Reservation, Reservation]] = {}
        """The reservations of each layer: of the count of layers, and of bookkeeping."""
        # Usually only a few of many layers keep forwards.
        self._keeping: dict[ResourceKey, BatchNormLayer] = {}

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
            InvalidArgumentError: The name is empty, a name or the id is too long, or the configuration is invalid.
            AlreadyExistsError: A layer of this name has another configuration or lifetime, or exists where that is
                forbidden.
            NotFoundError: A layer is required, but does not exist.
            ResourceExhaustedError: There are too many layers.
        """
        found = self._existing(key, config, reuse, creation_id, lifetime)
        if found is not None:
            return found, False
        layer = self._new(key, config, creation_id)
        self._begin(key, layer, lifetime)
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
        """Returns the layer of this name with its variables, and whether it is new.

        Other calls never find the layer without its variables.

        Args:
            key: The layer's name.
            config: The layer's configuration.
            reuse: Whether the layer may exist.
            creation_id: The id of the call.
            dtype: The dtype of the inputs.
            shape: The shape of the inputs, -1 for unknown sizes.
            lifetime: What ends the layer.

        Raises:
            InvalidArgumentError: As for `create`; or the layer does not accept such inputs.
            AlreadyExistsError: As for `create`.
            NotFoundError: As for `create`.
            ResourceExhaustedError: There are too many layers, or there is no memory for the variables.
        """
        found = self._existing(key, config, reuse, creation_id, lifetime)
        if found is None:
            layer = self._new(key, config, creation_id)
            try:
                await layer.build(dtype, shape)
                # Another call may have created it during the build.
                found = self._existing(key, config, reuse, creation_id, lifetime)
                if found is None:
                    self._begin(key, layer, lifetime)
                    return layer, True
            except BaseException:
                self._close(layer)
                raise
            self._close(layer)
        with self._layers.use(key, found.incarnation):
            await found.build(dtype, shape)
        return found, False

    def restore(
        self,
        key: ResourceKey,
        config: BatchNormConfig,
        lifetime: Lifetime,
        *,
        incarnation: str,
        creation_id: str,
        journal: LayerJournal | None,
    ) -> BatchNormLayer:
        """Adds a layer that existed before the server was restarted, without its state.

        Args:
            key: Its name.
            config: Its configuration, with seeds and durability.
            lifetime: What ends it.
            incarnation: Its incarnation.
            creation_id: The id of the call that created it.
            journal: Its journal.

        Raises:
            ResourceExhaustedError: There are too many layers, or there is no memory for it.
        """
        layer = self._counted(key, config, incarnation, creation_id, journal)
        self._layers.add(key, layer, lifetime, layer.config.collections)
        return layer

    async def settle(self) -> None:
        """Returns once a created or deleted layer is durable, so that others may see the change."""
        if self._environment.journals is not None:
            await self._environment.journals.settle()

    def _existing(
        self, key: ResourceKey, config: BatchNormConfig, reuse: Reuse, creation_id: str, lifetime: Lifetime
    ) -> BatchNormLayer | None:
        """Returns the layer of this name, or None if it has to be created; raises what `create` raises."""
        if reuse is Reuse.REQUIRED and not key.name:
            raise InvalidArgumentError(
                "reuse=True cannot be used without a name_or_scope; expected the name of a layer", field="layer.name"
            )
        found = self._layers.find(key)
        check_length(creation_id, MAX_ID_BYTES, "creation_id")
        config.check()
        variable = f"{key.name}/{_FIRST_VARIABLE}"
        if found is None:
            if reuse is Reuse.REQUIRED:
                raise NotFoundError(
                    f"Variable {variable} does not exist: there is no layer {str(key)!r}, and reuse is True. "
                    "Expected the name of one, or reuse=None",
                    field="layer.name",
                )
            return None
        is_retry = bool(creation_id) and creation_id == found.creation_id
        if reuse is Reuse.FORBIDDEN and not is_retry:
            raise AlreadyExistsError(
                f"Variable {variable} already exists, disallowed: there is a layer {str(key)!r}, and reuse is "
                "False. Did you mean to set reuse=True or None?",
                field="layer.name",
            )
        differences = describe_differences(found.config, config.with_choices_of(found.config))
        if differences:
            raise AlreadyExistsError(
                f"layer {str(key)!r} exists with another configuration: {differences}",
                field="config",
                code="GS_OTHER_SPEC",
            )
        self._layers.check_lifetime(key, lifetime)
        self._layers.renew(key)
        return found

    def has(self, key: ResourceKey) -> bool:
        """Returns True if there is a layer of this name that may be opened.

        Raises:
            InvalidArgumentError: The name is empty.
            AlreadyExistsError: Another user owns the name.
        """
        return self._layers.find(key) is not None

    def get(self, key: ResourceKey, incarnation: str = "") -> BatchNormLayer:
        """Returns the layer of this name, and of this incarnation if one is given.

        Raises:
            InvalidArgumentError: The name is empty.
            NotFoundError: There is no such layer.
        """
        return self._layers.get(key, incarnation)

    def use(self, key: ResourceKey, incarnation: str = "") -> AbstractContextManager[BatchNormLayer]:
        """Finds a layer as `get` does, and keeps it alive while a call uses it."""
        return self._layers.use(key, incarnation)

    def lifetime(self, key: ResourceKey) -> Lifetime:
        """Returns the lifetime of a layer that exists."""
        return self._layers.lifetime(key)

    def delete(self, key: ResourceKey, incarnation: str = "") -> bool:
        """Deletes a layer; returns whether it existed.

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
        self, container: str, after: str, size: int, *, scope: str, collection: str, user: Identity = ANONYMOUS
    ) -> list[tuple[ResourceKey, BatchNormLayer]]:
        """Returns up to `size` layers of a container whose names come after `after`, by name.

        Args:
            container: The layers' namespace.
            after: The last name of the previous page; empty for the first page.
            size: The maximum number of layers.
            scope: The prefix of their names.
            collection: A tag of the layers; empty for any.
            user: The caller, who does not see private layers of other users.
        """
        return self._layers.page(container, after, size, prefix=scope, tag=collection, user=user)

    def all_owned(self) -> Iterator[tuple[ResourceKey, str, BatchNormLayer]]:
        """Returns all layers with their owners; see `Directory.all_owned`."""
        return self._layers.all_owned()

    async def run_updates(
        self, container: str, collection: str, forward_ids: Sequence[str], *, user: Identity = ANONYMOUS
    ) -> int:
        """Runs the updates of all layers of a container whose `updates_collections` have this one.

        Skips private layers that the caller may not use.
        """
        count = 0
        async for key, layer in InTurns(list(self._keeping.items())):
            if key.container != container or collection not in layer.config.updates_collections:
                continue
            if self._layers.is_reached(key, user):
                await asyncio.sleep(0)
                count += await layer.run_updates(forward_ids)
        return count

    async def expire(self) -> int:
        """Forgets forwards whose lease has expired; returns how many."""
        count = 0
        async for key, layer in InTurns(list(self._keeping.items())):
            try:
                while expired := await layer.expire():
                    count += expired
                    await asyncio.sleep(0)
            except ServiceError as error:
                # The journal refused the event. Nothing has changed, and the next call tries again.
                _log.warning("the forwards of layer %s did not expire: %s", key, error)
        return count

    def _new(self, key: ResourceKey, config: BatchNormConfig, creation_id: str) -> BatchNormLayer:
        """Returns a new layer; chooses missing seeds and a missing durability."""
        environment = self._environment
        journals = environment.journals
        durability = durability_of_new(config.durability, journals, "config.durability")
        config = replace(config.with_seeds(environment.new_seed), durability=durability)
        incarnation = environment.new_id()
        journal = None if journals is None else journals.journal(key, config, incarnation, creation_id)
        return self._counted(key, config, incarnation, creation_id, journal)

    def _counted(
        self,
        key: ResourceKey,
        config: BatchNormConfig,
        incarnation: str,
        creation_id: str,
        journal: LayerJournal | None,
    ) -> BatchNormLayer:
        """Returns a layer that takes from the budgets of its creator and its container."""
        owner, container = key.user, key.container
        count = self.count.reserve(1, owner=owner, container=container)
        try:
            layer = BatchNormLayer(
                self._environment,
                key,
                config,
                incarnation=incarnation,
                creation_id=creation_id,
                journal=journal,
                on_presence=partial(self._note_forwards, key),
            )
            try:
                bookkeeping = self._bookkeeping.reserve(layer.config.text_bytes, owner=owner, container=container)
            except BaseException:
                layer.close()
                raise
        except BaseException:
            count.settle(0)
            raise
        self._reservations[layer] = count, bookkeeping
        return layer

    def _begin(self, key: ResourceKey, layer: BatchNormLayer, lifetime: Lifetime) -> None:
        self._layers.add(key, layer, lifetime, layer.config.collections)
        layer.begin(lifetime)

    def _note_forwards(self, key: ResourceKey, is_keeping: bool) -> None:
        if is_keeping:
            self._keeping[key] = self._layers.get(key)
        else:
            self._keeping.pop(key, None)

    def _close(self, layer: BatchNormLayer) -> None:
        for each in self._reservations.pop(layer):
            each.settle(0)
        layer.close()
