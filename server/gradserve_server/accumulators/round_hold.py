"""Holds rounds on a signal, and says in a file which are still open."""

import asyncio
import json
import logging
import os
import signal
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from gradserve_protocol.lasting import lasting_task
from gradserve_server.accumulators.rounds import RoundGate
from gradserve_server.resources.registry import ResourceKey
from gradserve_server.storage.journal import Durability

_log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.05


class InRounds(Protocol):
    """A resource that works in rounds: an accumulator, or parameters."""

    @property
    def num_accumulated(self) -> int:
        """The number of gradients in the round."""
        ...

    @property
    def is_changing(self) -> bool:
        """True while a gradient is being added or a round is ending, before `num_accumulated` shows it."""
        ...

    @property
    def durability(self) -> Durability | None:
        """The changes that survive the end of the server; None for none."""
        ...


Resources = Callable[[], Iterable[tuple[ResourceKey, InRounds]]]


@dataclass(frozen=True)
class HeldRounds:
    """The accumulators and parameters of a server that holds rounds.

    Attributes:
        open: Those whose round has gradients, or that are changing, by their full names, with their number.
        volatile: Those that end with the server, as their durability is none.
    """

    open: dict[str, int]
    volatile: tuple[str, ...]

    @classmethod
    def of(cls, resources: Iterable[tuple[ResourceKey, InRounds]]) -> "HeldRounds":
        """Looks at accumulators and parameters."""
        found, volatile = {}, []
        for key, each in resources:
            if each.num_accumulated or each.is_changing:
                found[str(key)] = each.num_accumulated
            if each.durability in (None, Durability.NONE):
                volatile.append(str(key))
        return cls(found, tuple(volatile))

    @classmethod
    def read(cls, path: Path) -> "HeldRounds | None":
        """Returns what a file says; None if there is none, as rounds are not held."""
        try:
            record: dict[str, Any] = json.loads(path.read_text())
        except FileNotFoundError:
            return None
        return cls(record["open"], tuple(record["volatile"]))


class RoundHold:
    """Shuts the gate of a server's rounds, and keeps a file up to date about them while it is shut."""

    def __init__(self, gate: RoundGate, resources: Resources, path: Path) -> None:
        self._gate = gate
        self._resources = resources
        self._path = path
        self._writing: asyncio.Task[None] | None = None

    def hold(self) -> None:
        """Shuts the gate, and begins to write the file. On the event loop."""
        if self._writing is None:
            self._gate.is_shut = True
            self._writing = lasting_task("the file about open rounds", self._write, _log)

    def release(self) -> None:
        """Opens the gate, and removes the file."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.cancel()  # It writes in one step, and waits for the rest of the time.
        self._gate.is_shut = False
        with suppress(OSError):
            self._path.unlink()

    async def _write(self) -> None:
        written = None
        while True:
            if (found := HeldRounds.of(self._resources())) != written:
                beside = self._path.with_name(f".{self._path.name}.{os.getpid()}")
                beside.write_text(json.dumps(asdict(found)))
                beside.replace(self._path)
                written = found
            await asyncio.sleep(_LOOK_SECONDS)


def follow_signals(hold: RoundHold) -> None:
    """Holds rounds from SIGUSR1 to SIGUSR2, on the running event loop."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, hold.hold)
    loop.add_signal_handler(signal.SIGUSR2, hold.release)
