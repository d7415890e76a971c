"""How messages are read and written."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Codec:
    """How to read requests and write responses of one method; None for the generated classes."""

    decode: Callable[[bytes], Any] | None = None
    encode: Callable[[Any], bytes] | None = None
