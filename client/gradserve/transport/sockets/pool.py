"""The connections to one server that carry no call, to be used again."""

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

from gradserve.transport.channel import closed
from gradserve.transport.settings import SocketSettings
from gradserve.transport.sockets.connection import Connection

ConnectionT = TypeVar("ConnectionT", bound=Connection)


class ConnectionPool(Generic[ConnectionT]):
    """The connections to one server. The one used last is used first; idle ones are closed after a while.

    A connection stays open while an array of a reply lies in memory of the server's. Safe to use from several threads.
    """

    def __init__(self, settings: SocketSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._clock = clock
        self._idle: list[ConnectionT] = []
        self._busy: set[ConnectionT] = set()
        self._num_opening = 0
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._idle) + len(self._busy)

    @property
    def is_closed(self) -> bool:
        """True if the client closed it."""
        return self._is_closed

    def take(self) -> ConnectionT | None:
        """Returns an idle connection for a call, or None.

        Raises:
            CallCancelledError: The pool is closed.
        """
        with self._lock:
            if self._is_closed:
                raise closed()
            if not self._idle:
                return None
            self._close_unused()
            while self._idle:
                connection = self._idle.pop()
                if connection.is_usable():
                    self._begin_call(connection)
                    return connection
                connection.close()
        return None

    def reserve(self) -> bool:
        """Returns True if there may be another connection, which `add` or `cancel` must follow."""
        with self._lock:
            self._check_open()
            if len(self) + self._num_opening >= self._settings.max_connections:
                return False
            self._num_opening += 1
            return True

    def cancel(self) -> None:
        """Takes back a reservation."""
        with self._lock:
            self._num_opening -= 1

    def add(self, connection: ConnectionT) -> None:
        """Adds the reserved connection, which carries a call.

        Raises:
            CallCancelledError: The pool is closed, and so is the connection now.
        """
        with self._lock:
            self._num_opening -= 1
            if self._is_closed:
                connection.close()
            self._check_open()
            self._begin_call(connection)

    def interruption(self, connection: ConnectionT) -> Callable[[], None]:
        """Returns a function that ends the call which a connection carries now, from another thread or task.

        Once that call has ended, it does nothing: the connection may carry somebody else's.
        """
        return partial(self._interrupt, connection, connection.num_calls)

    def give_back(self, connection: ConnectionT) -> None:
        """Makes a connection idle, whose call has ended."""
        with self._lock:
            self._busy.discard(connection)
            if self._is_closed:
                connection.close()
                return
            connection.last_used = self._clock()
            self._idle.append(connection)

    def drop(self, connection: ConnectionT) -> None:
        """Closes a connection that cannot be used any more."""
        with self._lock:
            self._busy.discard(connection)
            connection.close()

    def drop_idle(self) -> None:
        """Closes all idle connections."""
        with self._lock:
            for each in self._idle:
                each.close()
            self._idle.clear()

    def close(self) -> None:
        """Closes idle connections, and interrupts calls on the others."""
        with self._lock:
            self._is_closed = True
            for each in self._busy:
                each.interrupt()
        self.drop_idle()

    def _begin_call(self, connection: ConnectionT) -> None:
        connection.num_calls += 1
        self._busy.add(connection)

    def _interrupt(self, connection: ConnectionT, number: int) -> None:
        with self._lock:
            if connection in self._busy and connection.num_calls == number:
                connection.interrupt()

    def _close_unused(self) -> None:
        latest = self._clock() - self._settings.idle
        if self._idle[0].last_used >= latest:
            return
        for each in [each for each in self._idle if each.last_used < latest and not each.payloads.reads_in_place]:
            self._idle.remove(each)
            each.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise closed()
