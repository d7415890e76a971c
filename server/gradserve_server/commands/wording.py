"""The output of commands: numbers and tables for people, JSON for programs, progress bars, and exit codes."""

import dataclasses
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, Any, Self

import click

from gradserve_protocol.printing import visible, visible_lines

if TYPE_CHECKING:  # imported late: other commands do not need it, and start sooner
    from gradserve_protocol.server_status import AccumulatorStatus
    from gradserve_server.storage.store import StateStore


class ExitCode(IntEnum):
    """An exit code; `gradserve --help` and docs/command_output.md list them.

    Attributes:
        meaning: What it says.
    """

    meaning: str

    DONE = 0, "done; a server that was asked serves"
    FAILED = 1, "a server cannot be reached, does not serve or has refused a call; or something is damaged, or differs"
    USAGE = 2, "an option, an argument, a setting or a variable is not valid; nothing was done"

    def __new__(cls, number: int, meaning: str) -> Self:
        """Makes a member of a number and its meaning."""
        code = int.__new__(cls, number)
        code._value_ = number
        code.meaning = meaning
        return code


SIGNALLED = "128 + N", "signal N ended the command at once"
"""The exit codes of commands that a signal has ended, and their meaning."""


def exit_codes() -> list[tuple[str, str]]:
    """Returns all exit codes with their meanings."""
    return [*((str(int(each)), each.meaning) for each in ExitCode), SIGNALLED]


json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object, for programs.")


def echo_json(value: Any) -> None:
    """Prints a dataclass, or a mapping with dataclasses in it, as JSON with the same names."""
    text = json.dumps(as_plain(value), indent=2, allow_nan=False)
    click.echo(text.replace("\x7f", r"\u007f"))  # the only control character that JSON leaves as it is


def as_plain(value: Any) -> Any:
    """Converts dataclasses, and containers of them, to JSON values."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: as_plain(getattr(value, each.name)) for each in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): as_plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [as_plain(each) for each in value]
    if hasattr(value, "tolist"):  # an array
        return value.tolist()
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, float) and not math.isfinite(value):
        return None  # JSON has no other word for it
    return value if isinstance(value, str | int | float | bool) or value is None else str(value)


def shows_progress(*, as_json: bool = False) -> bool:
    """Returns True if a command shows its progress: standard error is a terminal, and the output is not JSON."""
    return not as_json and sys.stderr is not None and sys.stderr.isatty()


@contextmanager
def bytes_of(label: str, num_bytes: int) -> Iterator[Callable[[int], object] | None]:
    """Shows a bar with bytes and their rate; yields a function that adds bytes, or None if nothing is shown."""
    if not shows_progress():
        yield None
        return
    from gradserve.transport.progress import ProgressLine, TransferProgress

    line = ProgressLine(sys.stderr, label)
    with TransferProgress(line, line) as progress:
        progress.receives(num_bytes)
        yield progress.moved
        progress.end()


@contextmanager
def reading(store: "StateStore", num_bytes: int | None = None) -> Iterator[None]:
    """Shows how much of a state directory was read, out of so many bytes or of all."""
    with bytes_of("reading", store.num_bytes if num_bytes is None else num_bytes) as add:
        store.on_read = add
        try:
            yield
        finally:
            store.on_read = None


@contextmanager
def steps(label: str, number: int, *, as_json: bool = False) -> Iterator[Callable[[], object]]:
    """Shows a bar of steps; yields a function to call after each."""
    if not shows_progress(as_json=as_json):
        yield lambda: None
        return
    with click.progressbar(length=number, label=label, file=sys.stderr) as bar:
        yield lambda: bar.update(1)


_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def size(num_bytes: float) -> str:
    """Returns a number of bytes with a unit: "512 B", "1.5 MiB"."""
    value, unit = float(num_bytes), 0
    while abs(value) >= 1024 and unit < len(_UNITS) - 1:
        value /= 1024
        unit += 1
    return f"{value:.0f} {_UNITS[unit]}" if unit == 0 or value >= 100 else f"{value:.1f} {_UNITS[unit]}"


def duration(seconds: float) -> str:
    """Returns a time with a unit: "250 us", "1.5 ms", "42.0 s", "3 min 20 s", "2 d 4 h"."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 1:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for length, unit, smaller, smaller_unit in (
        (86400, "d", 3600, "h"),
        (3600, "h", 60, "min"),
        (60, "min", 1, "s"),
    ):
        if whole >= length:
            rest = whole % length // smaller
            return f"{whole // length} {unit}" + (f" {rest} {smaller_unit}" if rest else "")
    raise AssertionError("a minute is the least")


def figure(name: str, value: float) -> str:
    """Returns a figure of ServerInfo with the unit that its name implies."""
    if name.endswith("bytes"):
        return size(value)
    if name.endswith(("lease", "wait")):
        return duration(value)
    return f"{value:,.0f}"


def table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]], right: frozenset[int] = frozenset()) -> list[str]:
    """Returns the lines of rows under a header, in columns of the same width.

    Args:
        header: The titles of the columns.
        rows: The cells.
        right: The numbers of the columns that are set flush right.
    """
    shown = [header, *(tuple(map(visible, row)) for row in rows)]
    widths = [max(len(row[at]) for row in shown) for at in range(len(header))]
    lines = [
        "  ".join(
            cell.rjust(width) if at in right else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in shown
    ]
    return [line.rstrip() for line in lines]


_MOST_NAMED = 20


def some(names: Iterable[str], most: int = _MOST_NAMED) -> str:
    """Returns names, each once, with commas between them; of many the first ones, and how many more there are."""
    listed = list(dict.fromkeys(names))
    more = len(listed) - most
    return ", ".join(listed[:most]) + (f" and {more} more" if more > 0 else "")


def compared_weights(status: "AccumulatorStatus") -> list[str]:
    """Returns a line on whether the workers of an accumulator have equal weights; none if they were not compared."""
    compared = f"{status.num_compared} workers compared at step {status.compared_step}"
    if status.different:
        named = some(_different(worker_id, status) for worker_id in status.different)
        return [f"with other parameters than most: {named}" + (f"; {compared}" if status.num_compared else "")]
    if status.num_compared:
        return [f"weights equal on {status.num_compared} workers at step {status.compared_step}"]
    return []


def _different(worker_id: str, status: "AccumulatorStatus") -> str:
    since, equal_at = status.different_since.get(worker_id), status.different[worker_id]
    steps = [f"since step {since}"] if since is not None else []
    steps += [f"equal at step {equal_at}"] if equal_at >= 0 else []
    return f"{worker_id} ({', '.join(steps)})" if steps else worker_id


def block(lines: Iterable[str]) -> str:
    """Returns lines as one text. Names and messages in them cannot begin a line or control a terminal."""
    return "\n".join(visible(line).rstrip() for line in lines)


def tell(*lines: str) -> None:
    """Prints lines, made safe by `block`."""
    click.echo(block(lines))


def tell_marked(mark: str, colour: str, text: str) -> None:
    """Prints a mark, coloured if standard output is a terminal, and on the same line a text, made safe by `block`."""
    click.echo(f"{click.style(mark, fg=colour)} {block([text])}")


def tell_problem(text: str) -> None:
    """Prints a text on standard error, made safe by `visible_lines`."""
    click.echo(visible_lines(text), err=True)
