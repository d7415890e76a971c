"""A call as servicers and interceptors see it, whatever its transport."""

import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from gradserve_server.errors import ServiceError
from gradserve_server.observe.call_record import Origin, nowhere
from gradserve_server.security.credentials import Credentials, no_credentials
from gradserve_server.security.identity import ANONYMOUS, Identity
from gradserve_server.security.peer import PeerCertificate
from gradserve_server.tensors.payload import NO_PAYLOAD, Payload


@dataclass(frozen=True, slots=True)
class Call:
    """One call.

    Attributes:
        method: The full name of its method, e.g. "gradserve.v1.TensorService.PutTensors".
        deadline: The time at which its client stops waiting, by `time.monotonic`; None for never.
        payload: What came beside the message.
        carries_results: Whether results of any size travel with the reply.
        streams_results: Whether the reply may be a `StreamedReply`.
        peer: The checked certificate of its client, if the server asks for one.
        endings: What has been entered and is left once the reply has left, or cannot leave any more.
        credentials: Returns what its caller has shown.
        identity: Its caller, once it is admitted.
        origin: Returns where it came from.
        prepare: What must be done to the payload before anybody looks at it; None if nothing must.
        may_only_open: The error for creating what does not exist, and for takes, if its caller may only open what does.
    """

    method: str
    deadline: float | None = None
    payload: Payload = NO_PAYLOAD
    carries_results: bool = False
    streams_results: bool = False
    peer: PeerCertificate | None = None
    endings: list[AbstractContextManager[object]] = field(default_factory=list)
    credentials: Callable[[], Credentials] = no_credentials
    identity: Identity = ANONYMOUS
    origin: Callable[[], Origin] = nowhere
    prepare: Callable[[], Awaitable[None]] | None = None
    may_only_open: ServiceError | None = None

    def time_left(self) -> float | None:
        """Returns the seconds that the client goes on waiting, None for no limit."""
        return None if self.deadline is None else max(self.deadline - time.monotonic(), 0.0)

    def end(self, error: ServiceError | None = None) -> None:
        """Leaves the endings, the latest first; with an error if the call has failed after all."""
        while self.endings:
            self.endings.pop().__exit__(None if error is None else type(error), error, None)


@dataclass(frozen=True, slots=True)
class StreamedCall(Call):
    """A call whose answer is a stream.

    Attributes:
        send: Sends a response, and returns when there is room for the next one.
    """

    send: Callable[[Any], Awaitable[None]] = field(kw_only=True)
