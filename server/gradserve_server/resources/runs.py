"""The accumulators and parameters that a server has had: when they began and ended, and how far they came."""

import json
import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gradserve_server.resources.registry import ResourceKey
from gradserve_server.storage.journal import record_of, value_of
from gradserve_server.storage.store import Change, StateStore

MOST_PAST = 256
"""The past runs that are kept: some weeks of training, in about 100 KB."""
DELETED = "deleted"
STOPPED = "the server ended, and its durability was none"
LOST = "lost when the server was started again"

_BESIDE_A_RUN = re.compile(r"(.+)/[0-9a-f]{40}/.+", re.DOTALL)
"""NAME/INCARNATION/PURPOSE: internal accumulators of `gradserve.training`, e.g. for initial parameters."""


def run_of(name: str) -> str | None:
    """Returns the training run to which an internal accumulator belongs; None if the accumulator is not internal."""
    found = _BESIDE_A_RUN.fullmatch(name)
    return None if found is None else found[1]


@dataclass(frozen=True, slots=True)
class Run:
    """An accumulator or parameters, from their creation to their end. Times are in seconds since 1970.

    Attributes:
        kind: "accumulator" or "parameters".
        container: The container.
        name: The name.
        owner: The id of the client to which it was private; empty if it was shared.
        incarnation: The incarnation.
        begun: When it was created; of what came from another server or an earlier version, when this server found it.
        ended: When it ended; 0 if it has not, or that is not known.
        step: Its step at the end; 0 if that is not known.
        metrics: The means of what the workers of parameters had measured in the latest round, by name.
        reason: Why it ended; empty if it has not.
    """

    kind: str
    container: str
    name: str
    owner: str
    incarnation: str
    begun: float
    ended: float = 0.0
    step: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""

    @property
    def key(self) -> ResourceKey:
        """The key of the resource."""
        return ResourceKey(self.container, self.name)


class Runs:
    """The runs of a server, in its state directory if it has one. Used on the event loop only.

    A run is noted when it begins and when it ends, and nothing in between. Those that end without a round are
    forgotten, and so are internal accumulators of training runs.
    """

    def __init__(self, wall_clock: Callable[[], int], store: StateStore | None = None, most: int = MOST_PAST) -> None:
        """Reads what an earlier run of the server has kept.

        Args:
            wall_clock: The nanoseconds since 1970.
            store: The state directory; None without one.
            most: The most past runs to keep.

        Raises:
            DAMAGES: A record is damaged.
        """
        self._wall_clock = wall_clock
        self._store = store
        self._most = most
        self._past: deque[tuple[int, Run]] = deque()
        self._live: dict[tuple[str, ResourceKey], tuple[int, Run]] = {}
        self._left: dict[tuple[str, ResourceKey], tuple[int, Run]] = {}
        """Runs that had not ended when the server did."""
        self._last_number = 0
        rows = [] if store is None else store.rows("SELECT id, has_ended, record FROM run ORDER BY id")
        for number, has_ended, record in rows:
            run = value_of(Run, json.loads(record), {})
            self._last_number = number
            if has_ended:
                self._past.append((number, run))
            else:
                self._left[run.kind, run.key] = number, run

    @property
    def past(self) -> Sequence[Run]:
        """The past runs, the latest to end first."""
        return [run for _, run in sorted(self._past, key=lambda pair: pair[1].ended, reverse=True)]

    def begin(self, kind: str, key: ResourceKey, owner: str, incarnation: str) -> None:
        """Notes a resource that was created, or restored from the state directory."""
        if run_of(key.name) is not None:
            return
        left = self._left.pop((kind, key), None)
        if left is not None:
            number, before = left
            run = replace(before, owner=owner, incarnation=incarnation)  # which a restored backup changes
            if run != before:
                self._write("UPDATE run SET record = ? WHERE id = ?", _text(run), number)
        else:
            self._last_number += 1
            number = self._last_number
            run = Run(kind, key.container, key.name, owner, incarnation, self._now)
            self._write(
                "INSERT INTO run (id, kind, container, name, record) VALUES (?, ?, ?, ?, ?)",
                *(number, kind, key.container, key.name, _text(run)),
            )
        self._live[kind, key] = number, run

    def end(
        self, kind: str, key: ResourceKey, step: int, reason: str, metrics: Mapping[str, float] | None = None
    ) -> None:
        """Notes that a resource is gone, and how far it came; 0 steps for one without a round."""
        found = self._live.pop((kind, key), None)
        if found is None:
            return
        number, run = found
        if step <= 0:
            self._write("DELETE FROM run WHERE id = ?", number)
            return
        self._keep(number, replace(run, ended=self._now, step=step, metrics=dict(metrics or {}), reason=reason))

    def end_lost(self) -> None:
        """Ends the runs that an earlier run of the server has left, and that were not restored."""
        left, self._left = self._left, {}
        for number, run in left.values():
            self._keep(number, replace(run, reason=LOST))

    def _keep(self, number: int, run: Run) -> None:
        self._past.append((number, run))
        self._write("UPDATE run SET has_ended = 1, record = ? WHERE id = ?", _text(run), number)
        while len(self._past) > self._most:
            oldest, _ = self._past.popleft()
            self._write("DELETE FROM run WHERE id = ?", oldest)

    @property
    def _now(self) -> float:
        return self._wall_clock() / 1e9

    def _write(self, statement: str, *values: object) -> None:
        if self._store is not None:
            change = Change()
            change.execute(statement, *values)
            self._store.add(change)


def _text(run: Run) -> str:
    return json.dumps(record_of(run, {}))
