"""The ways in which connections fail."""

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum


class ConnectionFault(Enum):
    """How a connection ends."""

    CUT_REQUEST = "the connection is cut in the middle of the request"
    CUT_AFTER_REQUEST = "the request goes through, then the connection is cut"
    LATE_REQUEST = "the client's side is cut, and the request goes through later, behind another one"
    DROP_REPLY = "the connection is cut when the reply comes, of which nothing is passed on"
    CUT_REPLY = "the connection is cut in the middle of the reply"


@dataclass
class ConnectionFaults:
    """Says when connections fail.

    Attributes:
        mean_reads: How many pieces of traffic a connection carries before it fails, on average; None if none fails.
        seed: Of the random numbers.
        happened: How often each fault was done to a connection.
    """

    mean_reads: float | None = None
    seed: int = 0
    happened: Counter[ConnectionFault] = field(default_factory=Counter)
