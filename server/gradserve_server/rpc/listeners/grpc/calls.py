"""gRPC calls and the connections they arrive on.

A call's context tells who made it, and takes its end. gRPC's asyncio server neither limits calls nor says which of its
connections are idle, and it cannot end a connection. `OpenCalls`, `Connections` and `IdleConnections` do that.
"""

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn, TypeAlias, cast
from urllib.parse import quote

import grpc

from gradserve_server.errors import ResourceExhaustedError, ServiceError
from gradserve_server.observe.calls import Origin
from gradserve_server.rpc.boundary.chain import origin
from gradserve_server.rpc.boundary.status import status_code, status_message
from gradserve_server.security.identity import Credentials, PeerCertificate, in_authorization

_log = logging.getLogger(__name__)

DESCRIPTORS = "/proc/self/fd" if os.path.exists("/proc/self/fd") else "/dev/fd"
"""The folder that lists the descriptors of this process."""

_AUTHORIZATION = "authorization"
_STATUS_DETAILS = "grpc-status-details-bin"
_FORGOTTEN_AT_ONCE = 2
"""Clients forgotten for each new one: more than one, because clients with calls stay and must not let others add up."""
_RESERVE = 8
"""One part in this many, on top of all calls, is reserved for health checks."""
_GIVEN_UP_PER_SECOND = 50.0
"""Calls per second that a client may give up in the long run."""
_MAPPED = "::ffff:"
"""The prefix of an IPv4 address at a socket for both versions."""
_LOOK_SECONDS = 2.0
_IDLE_SECONDS = 60.0
"""Seconds from a client's last call until it counts as idle."""

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


async def end_with(error: ServiceError, context: Context) -> NoReturn:
    """Ends a call with the status of an error."""
    status = status_message(error)
    code = grpc.StatusCode[status_code(error)]
    details = ((_STATUS_DETAILS, status.SerializeToString()),) if status.details else ()
    aborting: Awaitable[NoReturn] = context.abort(code, status.message, details)
    try:
        await aborting
    except grpc.aio.AbortError as aborted:
        task = asyncio.current_task()
        assert task is not None
        task.add_done_callback(partial(_release_frames, aborted))
        raise
    except grpc.aio.InternalError:
        _log.debug("a client left before it learned of %s: %s", code.name, status.message)
        raise asyncio.CancelledError from None


def _release_frames(aborted: grpc.aio.AbortError, _done: object) -> None:
    """Frees the request and everything made from it.

    gRPC keeps the exception in the state of the call, to which its frames refer. Without this, memory of any size would
    wait for the garbage collector to find the cycle.
    """
    aborted.__traceback__ = aborted.__context__ = None


async def write(response: Any, method: str, context: Context) -> None:
    """Sends a response of a stream. Cancels the call if its client has left."""
    try:
        await context.write(response)
    except grpc.aio.InternalError:
        _log.debug("the client of %s left while it was answered", method)
        raise asyncio.CancelledError from None


def when_ended(context: Context, callback: Callable[[Any], object]) -> None:
    """Calls a function with the context when the call has ended."""
    cast("Any", context).add_done_callback(callback)  # the stubs want a callback of a class of their own


def deadline_of(context: Context) -> float | None:
    """Returns the time at which a call's client stops waiting, by `time.monotonic`; None for never."""
    remaining = time_left(context)
    return None if remaining is None else time.monotonic() + remaining


def time_left(context: Context) -> float | None:
    """Returns the seconds until a call's client stops waiting, None for no limit."""
    return cast("float | None", context.time_remaining())  # the stubs do not say that a call may have no deadline


def certificate_of(context: Context) -> PeerCertificate | None:
    """Returns the verified certificate of a call's client."""
    return PeerCertificate.of_properties(cast("Any", context).auth_context())


def credentials_of(context: Context, certificate: PeerCertificate | None) -> Credentials:
    """Returns the credentials of a call, including a certificate that is verified already."""
    metadata = context.invocation_metadata() or ()
    values = [value for key, value in metadata if key == _AUTHORIZATION and isinstance(value, str)]
    return replace(in_authorization(values), certificate=certificate, is_local=context.peer().startswith("unix:"))


def origin_of(context: Context) -> Origin:
    """Returns the origin of a call: its peer and its metadata."""
    metadata = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
    return origin(context.peer(), metadata)


@dataclass
class _Caller:
    last: float
    num_calls: int = 0
    num_given_up: float = 0.0
    """Calls that it has given up lately; decays with time."""
    counted_at: float = 0.0


class OpenCalls:
    """Limits the calls in flight, and remembers when each client made its last one.

    A call takes memory, in gRPC's core too, from its first to its last byte, even if nobody is going to answer it.
    """

    def __init__(
        self, limit: int, max_callers: int, max_given_up: int, end: Callable[[Collection[str]], object]
    ) -> None:
        """Starts with no call in flight.

        Args:
            limit: The most calls.
            max_callers: The number of clients to remember.
            max_given_up: The most calls that a client may give up at once.
            end: Ends the connections of clients.
        """
        self._max_given_up = max_given_up
        self._end = end
        self._limit = limit
        self._max_callers = max_callers
        self._callers: OrderedDict[str, _Caller] = OrderedDict()
        self.count = 0
        """The number of calls in flight."""

    def begin(self, context: Context, *, is_health: bool = False) -> None:
        """Counts a call until it has ended.

        Raises:
            ResourceExhaustedError: There are too many.
        """
        allowed = self._limit + self._limit // _RESERVE if is_health else self._limit
        if self.count >= allowed:
            raise ResourceExhaustedError(
                f"too many calls: {self.count} are under way, {self._limit} are allowed", code="GS_TOO_MANY_CALLS"
            )
        name = context.peer()
        caller = self._callers.get(name)
        now = asyncio.get_running_loop().time()
        if caller is None:
            caller = self._callers[name] = _Caller(now)
            self._forget()
        else:
            self._callers.move_to_end(name)
        caller.last = now
        caller.num_calls += 1
        self.count += 1

        def end(_context: object) -> None:
            caller.num_calls -= 1
            self.count -= 1

        when_ended(context, end)

    def give_up(self, context: Context) -> None:
        """Counts a call that its client gave up before the answer; disconnects a client that does so all the time.

        Arriving calls wait in one queue of gRPC's core, including those that were given up. So a client that only
        begins calls to give them up would keep everybody else waiting.
        """
        name = context.peer()
        caller = self._callers.get(name)
        if caller is None:
            return
        now = asyncio.get_running_loop().time()
        decay = (now - caller.counted_at) * _GIVEN_UP_PER_SECOND
        caller.num_given_up, caller.counted_at = max(caller.num_given_up - decay, 0.0) + 1, now
        if caller.num_given_up > self._max_given_up:
            caller.num_given_up = 0.0
            self._end((name,))

    def idle(self, clients: Iterable[str], since: float) -> list[str]:
        """Returns the clients that have no call in flight and began none since a time.

        Clients that never made a call come first, then those idle for longest.
        """
        found = [(each, self._callers.get(each)) for each in clients]
        idle = [
            (float("-inf") if caller is None else caller.last, name)
            for name, caller in found
            if caller is None or not (caller.num_calls or caller.last > since)
        ]
        return [name for _, name in sorted(idle)]

    def _forget(self) -> None:
        """Forgets clients without a call, those idle for longest first."""
        for _ in range(_FORGOTTEN_AT_ONCE):
            if len(self._callers) <= self._max_callers:
                return
            name, oldest = self._callers.popitem(last=False)
            if oldest.num_calls:
                self._callers[name] = oldest


class Connections:
    """Ends TCP connections of this process by the names that gRPC gives their clients, such as ipv4:10.0.0.7:51234.

    gRPC's asyncio server cannot end a connection, nor a call whose status it is sending. So the sockets are shut down:
    the core then cancels the calls of the connection, and frees what it has buffered. Clients of Unix sockets have no
    names of their own, so their connections are never ended.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def end(self, peers: Collection[str]) -> None:
        """Ends the connections of clients, in a thread because it walks all descriptors of the process."""
        named = frozenset(each for each in peers if not each.startswith("unix:"))
        if not named:
            return
        task = asyncio.create_task(asyncio.to_thread(shut_down, named))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class IdleConnections:
    """Keeps a quarter of the allowed connections free for newcomers, by ending idle ones.

    gRPC counts connections, but does not say which of them are idle. So while there are many, the sockets of the
    process are compared with the clients of the latest calls.
    """

    def __init__(self, limit: int, calls: OpenCalls, look_seconds: float = _LOOK_SECONDS) -> None:
        self._keep = limit - limit // 4
        self._calls = calls
        self._look_seconds = look_seconds
        self._known: frozenset[str] = frozenset()

    async def keep_room(self, ports: Collection[int]) -> None:
        """Checks the connections to some ports again and again, until it is cancelled."""
        while True:
            await asyncio.sleep(self._look_seconds)
            if len(os.listdir(DESCRIPTORS)) > self._keep:
                await self._look(ports)

    async def _look(self, ports: Collection[int]) -> None:
        connected = await asyncio.to_thread(clients_of, frozenset(ports))
        # A newcomer may not have made its first call yet.
        settled = [each for each in connected if each in self._known]
        self._known = frozenset(connected)
        too_many = len(connected) - self._keep
        if too_many > 0:
            since = asyncio.get_running_loop().time() - _IDLE_SECONDS
            ended = frozenset(self._calls.idle(settled, since)[:too_many])
            await asyncio.to_thread(shut_down, ended)


def shut_down(peers: Collection[str]) -> None:
    """Shuts down the sockets that are connected to some clients."""
    for sock in _sockets():
        with sock, contextlib.suppress(OSError):
            if sock.family in (socket.AF_INET, socket.AF_INET6) and _name(sock) in peers:
                sock.shutdown(socket.SHUT_RDWR)


def clients_of(ports: Collection[int]) -> list[str]:
    """Returns the names of the clients that are connected to some TCP ports of this process."""
    names = []
    for sock in _sockets():
        with sock, contextlib.suppress(OSError):
            if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.getsockname()[1] in ports:
                names.append(_name(sock))
    return names


def _sockets() -> Iterator[socket.socket]:
    """Yields the sockets of this process, through duplicates of their descriptors."""
    for number in os.listdir(DESCRIPTORS):
        with contextlib.suppress(OSError):  # it was closed, or is not a socket
            descriptor = os.dup(int(number))
            try:
                sock = socket.socket(fileno=descriptor)
            except OSError:
                os.close(descriptor)
                raise
            yield sock


def _name(sock: socket.socket) -> str:
    """Returns the name that gRPC gives the client of a socket."""
    host, port = sock.getpeername()[:2]
    if sock.family == socket.AF_INET or host.startswith(_MAPPED):
        return f"ipv4:{host.removeprefix(_MAPPED)}:{port}"
    return f"ipv6:{quote(f'[{host}]', safe=':')}:{port}"
