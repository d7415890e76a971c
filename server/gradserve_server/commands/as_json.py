"""Results of commands as JSON."""

import dataclasses
import json
import math
from collections.abc import Mapping
from enum import Enum
from typing import Any

import click

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object, for programs.")


def echo_json(value: Any) -> None:
    """Prints a dataclass, or a mapping with dataclasses in it, as JSON with the same names."""
    text = json.dumps(as_plain(value), indent=2, allow_nan=False)
    click.echo(text.replace("\x7f", r"\u007f"))  # the only control character that JSON leaves as it is


def as_plain(value: Any) -> Any:
    """Returns a dataclass, or what has dataclasses in it, as what JSON has words for."""
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
