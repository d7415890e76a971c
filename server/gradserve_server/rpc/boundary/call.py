"""What servicers and interceptors know of a call, whatever it came by."""

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Call:
    """One call.

    Attributes:
        method: The full name of its method, e.g. "gradserve.v1.TensorService.PutTensors".
        deadline: When its client stops waiting, on the clock of `time.monotonic`; None for never.
    """

    method: str
    deadline: float | None = None

    def time_left(self) -> float | None:
        """Returns for how many seconds the client goes on waiting, None for ever."""
        return None if self.deadline is None else max(self.deadline - time.monotonic(), 0.0)


@dataclass(frozen=True, slots=True)
class StreamedCall(Call):
    """A call that is answered with a stream.

    Attributes:
        send: Sends a response; returns when there is room for the next one.
    """

    send: Callable[[Any], Awaitable[None]] = field(kw_only=True)
