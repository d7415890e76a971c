"""Numbers and texts as people read them, and the output of commands."""

from collections.abc import Iterable

import click

from gradserve_server.limits import visible, visible_lines

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
    """Returns a figure of ServerInfo: with the unit that its name tells."""
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


def block(lines: Iterable[str]) -> str:
    """Returns lines as one text. Names and messages in them can neither begin a line nor do anything to a terminal."""
    return "\n".join(visible(line).rstrip() for line in lines)


def tell(*lines: str) -> None:
    """Prints lines; see `block`."""
    click.echo(block(lines))


def tell_problem(text: str) -> None:
    """Prints a text on standard error; see `visible_lines`."""
    click.echo(visible_lines(text), err=True)
