"""HTTP/1.1: one request and its answer as bytes, without I/O."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from urllib.parse import parse_qsl

import h11

MOST_HEAD_BYTES = 8 << 10
"""The longest head of a request: its first line and its headers."""
MOST_HEAD_LINES = 64
"""The most lines of a head. With its length, this bounds the work of parsing it."""
_MOST_QUERY_FIELDS = 16
_NO_BODY = frozenset({b"", b"0"})
_CLOSING = frozenset({400, 405, 408, 413, 421, 431, 501})
"""Status codes that close the connection: browsers and scrapers do not cause them."""


class HeadError(Exception):
    """A request that is malformed or not accepted.

    Attributes:
        status: The status code of the answer.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Request:
    """A request without a body.

    Attributes:
        method: Its method.
        path: Its path as sent, not decoded.
        query: The fields of the query by name; the last one counts if a name comes twice.
        headers: All values of its headers, by name in lower case.
    """

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, Sequence[str]]

    def header(self, name: str) -> str:
        """Returns the first value of a header, "" if it is missing."""
        return next(iter(self.headers.get(name, ())), "")


@dataclass(frozen=True)
class Answer:
    """An answer.

    Attributes:
        status: Its status code.
        body: Its body, or the beginning of it.
        content_type: The type of its body.
        headers: Further headers.
        more: The rest of the body, for a body of unknown length.
        end: Called once the answer was sent or given up.
    """

    status: int
    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    headers: Mapping[str, str] = field(default_factory=dict)
    more: AsyncIterator[bytes] | None = None
    end: Callable[[], object] = lambda: None


class Exchange:
    """Parses a request and serializes its answer with h11."""

    def __init__(self) -> None:
        self._protocol = h11.Connection(h11.SERVER, max_incomplete_event_size=MOST_HEAD_BYTES)
        self._sends_body = True

    def read(self, head: bytes) -> Request:
        """Parses the head of a request. A body is refused, never read.

        Raises:
            HeadError: The request is malformed or not accepted.
        """
        if head.count(b"\n") > MOST_HEAD_LINES:
            raise HeadError(431, f"expected at most {MOST_HEAD_LINES} lines")
        try:
            self._protocol.receive_data(head)
            event = self._protocol.next_event()
        except h11.RemoteProtocolError as error:
            raise HeadError(error.error_status_hint, f"no request of HTTP/1.1: {error}") from None
        if not isinstance(event, h11.Request):
            raise HeadError(400, "expected a request")
        method = event.method.decode("latin-1")
        self._sends_body = method != "HEAD"
        headers: dict[str, list[str]] = {}
        for name, value in event.headers:
            headers.setdefault(name.decode("latin-1"), []).append(value.decode("latin-1"))
        if "transfer-encoding" in headers or not _NO_BODY.issuperset(
            each.encode("latin-1") for each in headers.get("content-length", ())
        ):
            raise HeadError(413, "expected a request without a body")
        path, _, query = event.target.decode("latin-1").partition("?")
        try:
            fields = parse_qsl(query, keep_blank_values=True, errors="replace", max_num_fields=_MOST_QUERY_FIELDS)
        except ValueError:
            raise HeadError(400, f"expected at most {_MOST_QUERY_FIELDS} fields in the query") from None
        self._protocol.next_event()  # the end of the message
        return Request(method, path, dict(fields), headers)

    def begin(self, answer: Answer, headers: Mapping[str, str]) -> bytes:
        """Returns the head of an answer, with additional headers."""
        found = {**headers, **answer.headers, "Content-Type": answer.content_type}
        if answer.more is None:
            found["Content-Length"] = str(len(answer.body))
        if answer.status in _CLOSING:
            found["Connection"] = "close"
        response = h11.Response(
            status_code=answer.status, reason=HTTPStatus(answer.status).phrase.encode(), headers=list(found.items())
        )
        return self._protocol.send(response) or b""

    def data(self, piece: bytes | memoryview) -> Sequence[bytes | memoryview]:
        """Returns the bytes to send for a piece of the body."""
        if not self._sends_body:
            return ()
        return self._protocol.send_with_data_passthrough(h11.Data(data=piece)) or ()  # type: ignore[arg-type]

    def end(self) -> bytes:
        """Returns the bytes to send after the last piece."""
        return self._protocol.send(h11.EndOfMessage()) or b""

    @property
    def can_go_on(self) -> bool:
        """True if another exchange may follow on the connection."""
        return self._protocol.our_state is h11.DONE and self._protocol.their_state is h11.DONE
