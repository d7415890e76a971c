"""The gradients that a shard holds, in a state directory."""

import asyncio
import json
from collections.abc import Collection, Iterator

from gradserve_server.accumulators.durable.spec_records import joined, split
from gradserve_server.accumulators.gradient import Gradient
from gradserve_server.accumulators.shard_journal import PartKey, Staged
from gradserve_server.state.files.store import Change, StateStore
from gradserve_server.state.files.values import Allocate


class FileShardJournal:
    """Writes each gradient before it is acknowledged: the home may count it from then on."""

    def __init__(self, store: StateStore, number: int) -> None:
        """Takes the state directory, and the number of the accumulator there."""
        self._store = store
        self._number = number
        self._blobs: dict[PartKey, int] = {}
        self._ended = False

    async def accept(self, key: PartKey, staged: Staged, gradient: Gradient) -> asyncio.Future[None] | None:
        """See `ShardJournal`."""
        space = await self._store.reserve(gradient.nbytes)
        change = Change()
        if self._ended or key in self._blobs:
            change.give_back(space)
            self._store.add(change)
            return None
        blob = self._blobs[key] = self._store.new_blob()
        layout, arrays = split(dict(gradient.values))
        change.put(blob, arrays, space, live=gradient.live)
        change.execute(
            "INSERT INTO part (accumulator, home, id, epoch, local_step, names, blob) VALUES (?, ?, ?, ?, ?, ?, ?)",
            self._number,
            *key,
            *staged,
            json.dumps(layout),
            blob,
        )
        return self._store.submit(change)

    def stage_again(self, key: PartKey, epoch: int) -> asyncio.Future[None] | None:
        """See `ShardJournal`."""
        if self._ended or key not in self._blobs:
            return None
        change = Change()
        change.execute(
            "UPDATE part SET epoch = ? WHERE accumulator = ? AND home = ? AND id = ?", epoch, self._number, *key
        )
        return self._store.submit(change)

    def forget(self, keys: Collection[PartKey]) -> None:
        """See `ShardJournal`."""
        known = [key for key in dict.fromkeys(keys) if key in self._blobs]
        if not known or self._ended:
            return
        change = Change()
        for key in known:
            change.execute("DELETE FROM part WHERE accumulator = ? AND home = ? AND id = ?", self._number, *key)
        change.remove([self._blobs.pop(key) for key in known])
        self._store.add(change)

    def end(self) -> list[int]:
        """Writes nothing from now on, as the accumulator was deleted; returns the blobs, to be removed."""
        self._ended = True
        blobs, self._blobs = list(self._blobs.values()), {}
        return blobs

    def read(self, allocate: Allocate) -> Iterator[tuple[PartKey, Staged, Gradient]]:
        """Yields what was held before the server was started again, with what was said of it.

        Raises:
            StateError: Something is damaged.
            ValueError, TypeError, KeyError: A record is damaged.
        """
        rows = self._store.rows(
            "SELECT home, id, epoch, local_step, names, blob FROM part WHERE accumulator = ? ORDER BY blob",
            self._number,
        )
        for home, part_id, epoch, local_step, names, blob in rows:
            key = PartKey(home, part_id)
            self._blobs[key] = blob
            values = joined(json.loads(names), self._store.read(blob, allocate))
            yield key, Staged(epoch, local_step), Gradient(values, owned=True, finite=frozenset(values))
