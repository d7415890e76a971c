"""The recorded signatures of TensorFlow's raw ops."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Signature:
    """Of one op.

    Attributes:
        arguments: In TensorFlow's order.
        defaults: Of those that need not be given.
        outputs: In TensorFlow's order.
        allowed: Of attributes that may have certain values only: these, of types their names.
    """

    arguments: tuple[str, ...]
    defaults: dict[str, Any]
    outputs: tuple[str, ...]
    allowed: dict[str, tuple[str, ...]]


def load_signatures() -> dict[str, Signature]:
    """Returns all by the name of the op."""
    recorded = json.loads(Path(__file__).with_name("raw_op_signatures.json").read_text())
    return {op: _signature(entry) for op, entry in recorded["ops"].items()}


def _signature(entry: dict[str, Any]) -> Signature:
    return Signature(
        arguments=tuple(entry["arguments"]),
        defaults=entry["defaults"],
        outputs=tuple(entry["outputs"]),
        allowed={attribute: tuple(values) for attribute, values in entry["allowed"].items()},
    )
