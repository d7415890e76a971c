"""A line about the last minute."""

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from gradserve.server_status import MemoryStatus
from gradserve_server.observe.observed import Observed

_log = logging.getLogger("gradserve_server.summary")

EVERY_SECONDS = 60.0


@dataclass(frozen=True)
class Counts:
    """What has been counted since the server started."""

    calls: int
    failed: int
    rounds: int
    accepted: int
    stale: int
    refused: int
    received_bytes: int
    sent_bytes: int


class Summary:
    """Logs a line every minute, unless nobody has called."""

    def __init__(self, observed: Observed, memory: Callable[[], Iterable[MemoryStatus]]) -> None:
        """Takes what is counted, and what returns the memory in use."""
        self._observed = observed
        self._memory = memory
        self._last = self._counts()

    async def run(self) -> None:
        """Logs until it is cancelled."""
        while True:
            await asyncio.sleep(EVERY_SECONDS)
            self.log()

    def log(self) -> None:
        """Logs what has happened since the last line; nothing if nothing has."""
        last, now = self._last, self._counts()
        self._last = now
        if now.calls == last.calls:
            return
        in_use = next((each for each in self._memory()), None)
        num_waiting = sum(each.in_progress for each in self._observed.calls)
        differences = {name: getattr(now, name) - getattr(last, name) for name in Counts.__dataclass_fields__}
        _log.info(
            "last minute: %(calls)d calls, %(failed)d failed; %(rounds)d rounds; gradients: %(accepted)d accepted, "
            "%(stale)d stale, %(refused)d refused; %(received_bytes)d bytes received, %(sent_bytes)d sent; "
            "now %(in_progress)d calls under way, %(memory_bytes)d bytes of tensors",
            fields := {
                **differences,
                "in_progress": num_waiting,
                "memory_bytes": 0 if in_use is None else in_use.num_bytes,
            },
            extra={"fields": fields},
        )

    def _counts(self) -> Counts:
        observed, totals = self._observed, self._observed.histories.totals
        calls = [each for each in observed.calls if not each.service.startswith("grpc.")]
        ways = observed.traffic.by_name().values()
        return Counts(
            calls=sum(each.started for each in calls),
            failed=sum(count for each in calls for code, count in each.handled.items() if code != "OK"),
            rounds=totals.rounds.count,
            accepted=totals.accepted,
            stale=totals.stale,
            refused=totals.refused,
            received_bytes=sum(way.received for way in ways),
            sent_bytes=sum(way.sent for way in ways),
        )
