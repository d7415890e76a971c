"""`gradserve bench`: how fast a server answers from here, beside what this machine can do."""

import contextlib
import socket
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from gradserve_server.commands.servers import connected, server_options
from gradserve_server.commands.wording import block, duration, echo_json, json_option, size, steps, table

if TYPE_CHECKING:
    import gradserve


@dataclass(frozen=True)
class Way:
    """The speed of one way to the server.

    Attributes:
        way: "shared_memory", "bulk" or "grpc".
        small_median_seconds: The median time of a round of one worker with 4 KiB.
        small_p99_seconds: The time within which 99 of 100 of them ended.
        round_bytes_per_second: Bytes of the gradient of a large round of one worker, which go and come back.
        put_bytes_per_second: Bytes of large tensors that the server stores.
        get_bytes_per_second: Bytes of large tensors that it returns.
        why_not: Why the way could not be measured; empty if it was.
    """

    way: str
    small_median_seconds: float = 0.0
    small_p99_seconds: float = 0.0
    round_bytes_per_second: float = 0.0
    put_bytes_per_second: float = 0.0
    get_bytes_per_second: float = 0.0
    why_not: str = ""


@dataclass(frozen=True)
class Host:
    """The speed of this machine without a server.

    Attributes:
        copy_bytes_per_second: Bytes that one thread copies from memory to memory.
        socket_bytes_per_second: Bytes that two threads move through a TCP socket of the loopback interface.
    """

    copy_bytes_per_second: float
    socket_bytes_per_second: float


@dataclass(frozen=True)
class BenchResult:
    """The results of a benchmark.

    Attributes:
        address: The server.
        num_bytes: The size of large tensors.
        ways: The ways to the server.
        host: This machine.
    """

    address: str
    num_bytes: int
    ways: tuple[Way, ...]
    host: Host

    def text(self) -> str:
        """Returns the result as a table."""
        large = size(self.num_bytes)
        rows = [
            (
                each.way,
                duration(each.small_median_seconds),
                duration(each.small_p99_seconds),
                *(
                    f"{size(rate)}/s"
                    for rate in (each.round_bytes_per_second, each.put_bytes_per_second, each.get_bytes_per_second)
                ),
            )
            for each in self.ways
            if not each.why_not
        ]
        header = ("WAY", "4 KiB ROUND", "P99", f"{large} ROUNDS", "PUT", "GET")
        lines = table(header, rows, frozenset(range(1, 6))) if rows else []
        lines += [f"{each.way}: not possible here: {each.why_not}" for each in self.ways if each.why_not]
        lines.append(
            f"this machine: copies {size(self.host.copy_bytes_per_second)}/s with one thread, "
            f"moves {size(self.host.socket_bytes_per_second)}/s through a socket"
        )
        return block(lines)


_SMALL_BYTES = 4096
_WARM_UP_CALLS = 3
_MOST_CALLS = 10_000


def measure_way(client: "gradserve.Client", way: str, num_bytes: int, seconds: float, container: str) -> Way:
    """Measures one way to a server. What it makes there is private to the client, and deleted with it.

    Args:
        client: A client whose calls take that way.
        way: The name of the way.
        num_bytes: The size of large tensors.
        seconds: How long each of four figures is measured.
        container: Where it makes accumulators.

    Raises:
        gradserve.GradserveError: A call has failed.
    """
    import numpy as np

    small = _round_times(client, _SMALL_BYTES, seconds, container)
    large = _round_times(client, num_bytes, seconds, container)
    value = client.empty(num_bytes // 4, np.float32)
    value.fill(1.0)
    handles: list[gradserve.TensorHandle] = []

    def put() -> None:
        handles.append(client.put(value))
        if len(handles) > 1:
            client.delete(handles.pop(0))

    try:
        put_times = _times(put, seconds)
        get_times = _times(lambda: client.get(handles[0]), seconds)
    finally:
        client.delete(*handles)
    return Way(
        way=way,
        small_median_seconds=statistics.median(small),
        small_p99_seconds=sorted(small)[int(len(small) * 0.99)],
        round_bytes_per_second=num_bytes / statistics.median(large),
        put_bytes_per_second=num_bytes / statistics.median(put_times),
        get_bytes_per_second=num_bytes / statistics.median(get_times),
    )


def measure_host(num_bytes: int, seconds: float) -> Host:
    """Measures this machine without a server; each figure takes `seconds`."""
    import numpy as np

    source, target = np.ones(num_bytes, np.uint8), np.zeros(num_bytes, np.uint8)
    copying = statistics.median(_times(lambda: np.copyto(target, source), seconds))
    return Host(num_bytes / copying, num_bytes / statistics.median(_socket_times(num_bytes, seconds)))


def _round_times(client: "gradserve.Client", num_bytes: int, seconds: float, container: str) -> list[float]:
    import numpy as np

    gradient = {"x": client.empty(num_bytes // 4, np.float32)}
    gradient["x"].fill(1.0)
    acc = client.gradient_accumulator(gradient, container=container)
    step = 0

    def one_round() -> None:
        nonlocal step
        step = acc.push_pull(gradient, num_required=1, local_step=step, copy=False).step

    return _times(one_round, seconds)


def _times(work: Callable[[], object], seconds: float) -> list[float]:
    """Returns how long each repetition took, for about `seconds`, after a warm-up."""
    for _ in range(_WARM_UP_CALLS):
        work()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < _MOST_CALLS:
        began = time.perf_counter()
        work()
        now = time.perf_counter()
        times.append(now - began)
        if now >= end:
            break
    return times


def _socket_times(num_bytes: int, seconds: float) -> list[float]:
    data, received = bytes(num_bytes), bytearray(num_bytes)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        sender = socket.create_connection(listening.getsockname())
        receiver, _ = listening.accept()

    def receive() -> None:
        left = memoryview(received)
        while left:
            num_bytes = receiver.recv_into(left)
            if not num_bytes:
                raise ConnectionError("the other end of the socket has closed it")
            left = left[num_bytes:]

    def move() -> None:
        thread = threading.Thread(target=sender.sendall, args=(data,))
        thread.start()
        receive()
        thread.join()

    with sender, receiver:
        return _times(move, seconds)


_WAYS = ("shared_memory", "bulk", "grpc")
_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


class Size(click.ParamType[int]):
    """A size in bytes, with or without a unit."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Returns the number of bytes, a multiple of 4."""
        if isinstance(value, int):
            return value
        unit = next((each for each in _UNITS if value.endswith(each)), "")
        num_bytes = 0
        with contextlib.suppress(ValueError, OverflowError):
            num_bytes = int(float(value.removesuffix(unit)) * _UNITS.get(unit, 1)) // 4 * 4
        if not 4096 <= num_bytes <= _UNITS["GiB"]:
            self.fail(f"expected a size from 4KiB to 1GiB, such as 10MiB, got {value!r}", param, ctx)
        return num_bytes


@click.command()
@click.option("--size", "num_bytes", type=Size(), default="10MiB", show_default=True, help="the size of large tensors")
@click.option(
    "--seconds",
    type=click.FloatRange(0.01, 600),
    default=1.0,
    show_default=True,
    help="how long each figure is measured: four for each way, and two of this machine",
)
@click.option(
    "--transport",
    "--way",
    "ways",
    multiple=True,
    type=click.Choice(_WAYS),
    help="only this way, as transport= of gradserve.connect; repeatable",
)
@click.option("--container", metavar="NAME", default="", help="where to make accumulators  [default: default]")
@json_option
@server_options
def bench(
    address: str,
    timeout: float,
    num_bytes: int,
    seconds: float,
    ways: tuple[str, ...],
    container: str,
    as_json: bool,
    **tls: Any,
) -> None:
    """Measure how fast the server at ADDRESS answers from here, by each way, beside what this machine can do.

    Times are measured at this client, beside other work of the server and the machine. What the benchmark makes
    on the server is deleted at its end.
    """
    with connected(address, timeout, **tls) as client:
        client.server_info()  # so that a server that is not there is an error, not a way that is not possible
    found = []
    wanted = [way for way in _WAYS if way in ways] or list(_WAYS)
    with steps("measuring", len(wanted) + 1, as_json=as_json) as next_step:
        for way in wanted:
            try:
                with connected(address, timeout, transport=way, **tls) as client:
                    found.append(measure_way(client, way, num_bytes, seconds, container))
            except click.ClickException as error:
                found.append(Way(way, why_not=error.message.removeprefix(f"{address}: ")))
            next_step()
        host = measure_host(num_bytes, seconds)
        next_step()
    result = BenchResult(address, num_bytes, tuple(found), host)
    if as_json:
        echo_json(result)
    else:
        click.echo(result.text())
    if all(each.why_not for each in found):
        raise click.ClickException(f"{address}: no way could be measured")
