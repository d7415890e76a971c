"""Serializers of messages."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Codec:
    """The serializers of one method's requests and responses; None for the generated classes.

    Attributes:
        decoder: Makes what reads requests from what parses them.
        encode: Writes a response.
    """

    decoder: Callable[[Callable[[bytes], Any]], Callable[[bytes], Any]] | None = None
    encode: Callable[[Any], bytes] | None = None
