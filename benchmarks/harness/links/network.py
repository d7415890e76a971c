"""A link of a chosen bandwidth to a network namespace, where a server runs.

Two virtual network devices (veth, or TUN if packets are delayed) are the ends of the link: one here, one in the
namespace. A token bucket filter (tbf) caps what each of them sends. The namespace belongs to a process that ends when
this one does, however that ends; with the process go the namespace, and with that both devices.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.harness.links.packets import MTU, NoPacketsError, delaying_devices

_PROGRAMS = ("ip", "tc", "unshare", "nsenter")
_COMMAND_SECONDS = 30.0
_QUEUE_SECONDS = 0.05
_BURST_SECONDS = 0.01
_LEAST_BURST_BYTES = 32 * 1024
_QUEUE_PACKETS = 10_000


class LinkNotAvailableError(Exception):
    """The machine cannot make links; the message says why in one line."""


@dataclass(frozen=True)
class Link:
    """A link to a namespace.

    Attributes:
        here: The address of this end.
        there: The address of the end in the namespace.
        enter: A command that becomes the command that follows it, in the namespace.
        device: The name of the device at this end.
    """

    here: str
    there: str
    enter: tuple[str, ...]
    device: str


@contextlib.contextmanager
def capped_link(megabits: float, round_trip: float = 0.0) -> Iterator[Link]:
    """Makes a link with so many Mbit/s in each direction, until the end of the block.

    Args:
        megabits: The bandwidth.
        round_trip: The delay of packets in both directions together, in seconds.

    Raises:
        LinkNotAvailableError: The machine has no such links, or this process is not allowed to make them.
    """
    check_programs()
    number = random.SystemRandom().randrange(1 << 15)
    # 198.18.0.0/15 is reserved for benchmarks of networks, so it is not in use; every link has four of its addresses.
    base = (198 << 24 | 18 << 16) + 4 * number
    here, there = dotted(base + 1), dotted(base + 2)
    device = f"gradserve{number}"
    with (
        new_namespace() as pid,
        _delaying_pair(device, pid, round_trip) if round_trip else _pair_of_devices(device, pid),
    ):
        enter = enter_command(pid)
        for prefix, address in (((), here), (enter, there)):
            run_command(*prefix, "ip", "address", "add", f"{address}/30", "dev", device)
            run_command(*prefix, "ip", "link", "set", device, "up")
            run_command(*prefix, "tc", "qdisc", "add", "dev", device, "root", *cap(megabits))
        run_command(*enter, "ip", "link", "set", "lo", "up")
        yield Link(here, there, enter, device)


def cap(megabits: float) -> tuple[str, ...]:
    """Returns the filter that caps what a device sends, as `tc qdisc add` takes it."""
    bits = megabits * 1e6
    burst = max(int(bits / 8 * _BURST_SECONDS), _LEAST_BURST_BYTES)
    return ("tbf", "rate", f"{bits:.0f}bit", "burst", str(burst), "latency", f"{_QUEUE_SECONDS * 1e3:.0f}ms")


@contextlib.contextmanager
def new_namespace() -> Iterator[int]:
    """Starts a process in a network namespace of its own, and yields its id; both end with the block."""
    with subprocess.Popen(
        ["unshare", "--net", "cat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
    ) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        assert holder.stderr is not None
        with contextlib.suppress(BrokenPipeError):
            holder.stdin.write(b"\n")  # comes back when the namespace is there
        if not holder.stdout.readline():
            raise LinkNotAvailableError(_last_line(holder.stderr.read()))
        try:
            yield holder.pid
        finally:
            holder.stdin.close()


def _devices(name: str, pid: int, round_trip: float) -> contextlib.AbstractContextManager[None]:
    return _delaying_pair(name, pid, round_trip) if round_trip else _pair_of_devices(name, pid)


@contextlib.contextmanager
def _pair_of_devices(name: str, pid: int) -> Iterator[None]:
    """Makes two devices of the same name, one here and one in the namespace of a process."""
    run_command("ip", "link", "add", name, "type", "veth", "peer", "name", name, "netns", str(pid))
    try:
        yield
    finally:
        # The kernel removes both some time after the namespace has lost its last process: do it now.
        with contextlib.suppress(LinkNotAvailableError):
            run_command("ip", "link", "delete", name)


@contextlib.contextmanager
def _delaying_pair(name: str, pid: int, round_trip: float) -> Iterator[None]:
    """Makes two devices, one here and one in the namespace of a process, between which packets take their time."""
    there = f"{name}x"
    try:
        with delaying_devices((name, there), round_trip / 2):
            run_command("ip", "link", "set", there, "netns", str(pid))
            enter = enter_command(pid)
            run_command(*enter, "ip", "link", "set", there, "name", name)
            for prefix in ((), enter):
                run_command(*prefix, "ip", "link", "set", name, "mtu", str(MTU), "txqueuelen", str(_QUEUE_PACKETS))
            yield
    except NoPacketsError as error:
        raise LinkNotAvailableError(str(error)) from None


def enter_command(pid: int) -> tuple[str, ...]:
    """Returns a command that becomes the command that follows it, in the namespace of a process."""
    return ("nsenter", f"--net=/proc/{pid}/ns/net", "--")


def check_programs() -> None:
    """Checks that the programs that make links are installed.

    Raises:
        LinkNotAvailableError: One is not.
    """
    for program in _PROGRAMS:
        if shutil.which(program) is None:
            raise LinkNotAvailableError(f"{program} is not installed")


def run_command(*command: str) -> None:
    """Runs a command that changes the network.

    Raises:
        LinkNotAvailableError: It has failed; the message has its last line.
    """
    done = subprocess.run(
        command, capture_output=True, timeout=_COMMAND_SECONDS, check=False, env={**os.environ, "LC_ALL": "C"}
    )
    if done.returncode:
        raise LinkNotAvailableError(f"{' '.join(command)}: {_last_line(done.stderr)}")


def _last_line(output: bytes) -> str:
    return (output.decode(errors="replace").strip().splitlines() or ["no message"])[-1]


def dotted(address: int) -> str:
    """Returns an IPv4 address as text."""
    return ".".join(str(address >> shift & 255) for shift in (24, 16, 8, 0))
