"""What happened between two pictures of a server."""

from dataclasses import dataclass, field

from gradserve_protocol.server_status import ServerStatus


@dataclass(frozen=True)
class Rates:
    """What happened each second between two pictures: nothing, for the first one and after a restart.

    Attributes:
        rounds: Rounds of all accumulators.
        gradients: Accepted gradients.
        received: Bytes received, by way.
        sent: Bytes sent, by way.
        calls: Calls, by service and method.
    """

    rounds: float = 0.0
    gradients: float = 0.0
    received: dict[str, float] = field(default_factory=dict)
    sent: dict[str, float] = field(default_factory=dict)
    calls: dict[tuple[str, str], float] = field(default_factory=dict)

    @classmethod
    def between(cls, before: ServerStatus | None, now: ServerStatus) -> "Rates":
        """Returns the rates between two pictures, of which the first may be missing."""
        if before is None or before.incarnation != now.incarnation or now.uptime <= before.uptime:
            return cls()
        seconds = now.uptime - before.uptime
        earlier_ways = {each.way: each for each in before.traffic}
        earlier_methods = {(each.service, each.method): each.started for each in before.methods}
        pairs = [(each, earlier_ways[each.way]) for each in now.traffic if each.way in earlier_ways]
        return cls(
            rounds=(now.totals.rounds - before.totals.rounds) / seconds,
            gradients=(now.totals.accepted - before.totals.accepted) / seconds,
            received={each.way: (each.received_bytes - old.received_bytes) / seconds for each, old in pairs},
            sent={each.way: (each.sent_bytes - old.sent_bytes) / seconds for each, old in pairs},
            calls={
                (each.service, each.method): (each.started - earlier_methods.get((each.service, each.method), 0))
                / seconds
                for each in now.methods
            },
        )
