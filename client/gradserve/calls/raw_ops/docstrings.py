"""Completes the docstrings of ops that come in versions, from the one version that is described in full."""

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

_SECTION = re.compile(r"^(Args|Returns|Raises):$", re.MULTILINE)
_ENTRY = re.compile(r"^    (\w+): .*(?:\n {8,}.*)*", re.MULTILINE)


def complete(ops: type, described_by: Mapping[str, str]) -> None:
    """Completes docstrings with other ops' arguments, results and errors, and with their text if there is none.

    A description that a docstring already has is kept, and nothing is added that the op does not have.

    Args:
        ops: The class that has the ops as methods.
        described_by: For each op to complete, the name of the op that is described in full.
    """
    for name, full in described_by.items():
        op = getattr(ops, name)
        op.__doc__ = _completed(op, _sections(op), _sections(getattr(ops, full)))


def _completed(op: Callable[..., Any], own: dict[str, str], full: dict[str, str]) -> str:
    text = "" if "\n\n" in own["Text"] else full["Text"].partition("\n\n")[2]
    arguments = _entries(full["Args"]) | _entries(own.get("Args", ""))
    parts = [
        own["Text"],
        text,
        _listed("Args", [arguments[name] for name in list(inspect.signature(op).parameters)[1:]]),
    ]
    if "Returns" in full:
        parts.append(_listed("Returns", [own.get("Returns", full["Returns"])]))
    parts.append(_listed("Raises", [own.get("Raises", full["Raises"])]))
    return "\n\n".join(part for part in parts if part)


def _sections(op: Callable[..., Any]) -> dict[str, str]:
    text, *rest = _SECTION.split(inspect.getdoc(op) or "")
    return {"Text": text.strip(), **{name: body.strip("\n") for name, body in zip(rest[::2], rest[1::2], strict=True)}}


def _entries(section: str) -> dict[str, str]:
    return {found[1]: found[0] for found in _ENTRY.finditer(section)}


def _listed(title: str, entries: list[str]) -> str:
    return "\n".join([f"{title}:", *entries])
