"""What a benchmark of a server has found."""

from dataclasses import dataclass

from gradserve_server.commands.wording import block, duration, size, table


@dataclass(frozen=True)
class Way:
    """What one way to the server can do.

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
    """What this machine can do without a server.

    Attributes:
        copy_bytes_per_second: Bytes that one thread copies from memory to memory.
        socket_bytes_per_second: Bytes that two threads move through a TCP socket of the loopback interface.
    """

    copy_bytes_per_second: float
    socket_bytes_per_second: float


@dataclass(frozen=True)
class BenchResult:
    """What a benchmark has found.

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
