"""Processes that talk to each other, each in a network namespace of its own and behind a link of its own.

The other ends of the links are in one more namespace, which routes packets between them: the hub. What one process
sends to another goes through two links.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.harness.links.network import (
    LinkNotAvailableError,
    cap,
    check_programs,
    dotted,
    enter_command,
    new_namespace,
    run_command,
)
from benchmarks.harness.links.packets import MTU, NoPacketsError, delaying_devices

_DEVICE = "gradserve"
_QUEUE_PACKETS = 10_000
_BASE = 198 << 24 | 18 << 16
"""198.18.0.0/15 is reserved for benchmarks of networks. No other process is in these namespaces."""


@dataclass(frozen=True)
class Spoke:
    """The end of a link at which a process runs.

    Attributes:
        address: Its address, which all other ends reach.
        device: The name of its network device.
        enter: A command that becomes the command that follows it, in the namespace.
    """

    address: str
    device: str
    enter: tuple[str, ...]


@contextlib.contextmanager
def links_to_hub(number: int, megabits: float, round_trip: float = 0.0) -> Iterator[list[Spoke]]:
    """Makes links to a hub, until the end of the block.

    Args:
        number: The number of links, at most 64.
        megabits: The bandwidth of each in each direction.
        round_trip: The delay of packets from one end to another and back, in seconds, half of it in either link.

    Raises:
        LinkNotAvailableError: The machine has no such links, or this process is not allowed to make them.
    """
    check_programs()
    with contextlib.ExitStack() as stack:
        center = stack.enter_context(new_namespace())
        run_command(*enter_command(center), "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
        spokes = []
        for index in range(number):
            pid = stack.enter_context(new_namespace())
            name = f"{_DEVICE}{index}"
            if round_trip:
                stack.enter_context(_delaying_pair(name, center, pid, round_trip / 2))
            else:
                run_command(
                    *enter_command(center),
                    "ip",
                    "link",
                    "add",
                    name,
                    "type",
                    "veth",
                    "peer",
                    _DEVICE,
                    "netns",
                    str(pid),
                )
            inner, outer = dotted(_BASE + 4 * index + 1), dotted(_BASE + 4 * index + 2)
            for enter, device, address in (
                (enter_command(center), name, inner),
                (enter_command(pid), _DEVICE, outer),
            ):
                run_command(*enter, "ip", "address", "add", f"{address}/30", "dev", device)
                run_command(*enter, "ip", "link", "set", device, "up")
                run_command(*enter, "tc", "qdisc", "add", "dev", device, "root", *cap(megabits))
            run_command(*enter_command(pid), "ip", "link", "set", "lo", "up")
            run_command(*enter_command(pid), "ip", "route", "add", "default", "via", inner)
            spokes.append(Spoke(outer, _DEVICE, enter_command(pid)))
        yield spokes


@contextlib.contextmanager
def _delaying_pair(name: str, center: int, pid: int, delay: float) -> Iterator[None]:
    """Makes two devices, one at the hub and one at a process, between which packets take their time."""
    # Both are made in this namespace, where other links may have such names.
    made = (f"{name}c{center % 1000}", f"{name}p{center % 1000}")
    try:
        with delaying_devices(made, delay):
            for before, after, owner in ((made[0], name, center), (made[1], _DEVICE, pid)):
                run_command("ip", "link", "set", before, "netns", str(owner))
                enter = enter_command(owner)
                run_command(*enter, "ip", "link", "set", before, "name", after)
                run_command(*enter, "ip", "link", "set", after, "mtu", str(MTU), "txqueuelen", str(_QUEUE_PACKETS))
            yield
    except NoPacketsError as error:
        raise LinkNotAvailableError(str(error)) from None
