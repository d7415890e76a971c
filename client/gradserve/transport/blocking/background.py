"""Operations that run in the background, in a thread.

They refer only to channels, not to the client: so a forgotten client is collected, which stops them.
"""

import logging
import os
import queue
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import grpc

from gradserve.calls.exchange import CleanUp, Operation, Pause, Unary, forget
from gradserve.calls.retries import Attempt, Contact
from gradserve.errors import GradserveError, UnavailableError
from gradserve.transport.driving import attempts, completed, drive
from gradserve.transport.settings import ConnectionSettings
from gradserve.transport.sockets.connection import Watch
from gradserve.transport.status import error_from_status
from gradserve_protocol.frames import Metadata
from gradserve_protocol.lasting import PAUSE_SECONDS, Failures

_log = logging.getLogger("gradserve")

_JOIN_SECONDS = 5.0
_FORK_SECONDS = 1.0
"""The seconds that a fork waits until background calls are cancelled."""


class _StoppedError(Exception):
    """The operation is to stop."""


class _ForkedError(Exception):
    """The process has been forked."""


class _Fork:
    """A fork for which a background call is cancelled: gRPC can be forked safely only between calls."""

    def __init__(self) -> None:
        self.is_clear = threading.Event()
        self.is_over = threading.Event()


class BackgroundThread:
    """Carries out an operation of exchanges and pauses in a daemon thread; begins it again after a fault of its own.

    A fork of the process cancels its unary call, as if the server were unavailable for a moment, and ends a pause.
    """

    def __init__(
        self,
        begin: Callable[[], Operation[None]],
        settings: ConnectionSettings,
        start_call: Callable[[Unary, float | None, Metadata], Any],
        carry: Callable[[Attempt, Watch], Any],
    ) -> None:
        """Takes what begins the operation, the settings of the connection, and what makes its calls.

        Args:
            begin: Begins the operation.
            settings: The settings of the connection.
            start_call: Starts a unary call.
            carry: Makes a call with tensors.
        """
        self._begin = begin
        self._settings = settings
        self._start_call = start_call
        self._carry = carry
        self._interrupt: Callable[[], object] | None = None
        self._is_stopped = False
        # Ended calls, beginning forks, and None to stop.
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="gradserve-background", daemon=True)
        self._thread.start()
        _RUNNING.add(self)

    @property
    def is_done(self) -> bool:
        """True if the operation has ended."""
        return not self._thread.is_alive()

    def stop(self) -> None:
        """Stops the operation soon."""
        self._is_stopped = True
        self._events.put(None)
        interrupt = self._interrupt
        if interrupt is not None:
            interrupt()

    def break_off(self, fork: _Fork) -> None:
        """Cancels the call, and starts no other until a fork is over."""
        self._events.put(fork)

    def join(self) -> None:
        """Waits until a stopped operation has ended."""
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_SECONDS)

    def _run(self) -> None:
        failures = Failures("an operation in the background", _log)
        with suppress(GradserveError, _StoppedError):
            while True:
                try:
                    steps = attempts(self._begin(), self._settings, Contact(), in_background=True)
                    return completed(drive(steps, self._perform))
                except (GradserveError, _StoppedError):
                    raise
                except Exception as error:
                    failures.note(error)
                self._pause(PAUSE_SECONDS)

    async def _perform(self, step: Any) -> Any:
        match step:
            case Attempt(Unary() as unary, timeout, metadata):
                return self._call(unary, timeout, metadata)
            case Attempt():
                return self._call_with_tensors(step)
            case Pause(seconds):
                return self._pause(seconds)
            case CleanUp():
                return forget
        raise TypeError(f"expected an exchange or a pause, got {step!r}")

    def _pause(self, seconds: float) -> None:
        # Nothing has failed if a fork ends it: an operation expects no error of a pause.
        with suppress(queue.Empty, _ForkedError):
            self._react(self._events.get(timeout=seconds))

    def _call_with_tensors(self, attempt: Attempt) -> Any:
        try:
            return self._carry(attempt, self._watch)
        except grpc.FutureCancelledError:  # as `stop` interrupts it
            raise _StoppedError from None
        finally:
            self._interrupt = None

    def _watch(self, interrupt: Callable[[], object]) -> None:
        self._interrupt = interrupt
        if self._is_stopped:
            interrupt()

    def _call(self, unary: Unary, timeout: float | None, metadata: Metadata) -> Any:
        try:
            call: Any = self._start_call(unary, timeout, metadata)
        except ValueError:  # the channel is closed
            raise _StoppedError from None
        call.add_done_callback(self._events.put)
        try:
            self._react(self._events.get(), call)
            return call.result()
        except grpc.FutureCancelledError:
            raise _StoppedError from None
        except _ForkedError:
            raise UnavailableError("the process was forked") from None
        except grpc.RpcError:
            raise error_from_status(call.code(), call.details(), call.trailing_metadata()) from None
        finally:
            call.cancel()

    def _react(self, event: Any, call: Any = None) -> None:
        if event is None:
            raise _StoppedError
        if isinstance(event, _Fork):
            later = []
            if call is not None:
                call.cancel()
                while (ended := self._events.get()) is not call:
                    later.append(ended)
            event.is_clear.set()
            event.is_over.wait(_FORK_SECONDS)
            for each in later:
                self._events.put(each)
            raise _ForkedError


# Known to the hooks of forks, which cannot be unregistered.
_RUNNING: weakref.WeakSet[BackgroundThread] = weakref.WeakSet()
_FORKS: list[_Fork] = []


def _before_fork() -> None:
    for each in list(_RUNNING):
        if not each.is_done:
            _FORKS.append(_Fork())
            each.break_off(_FORKS[-1])
    for fork in _FORKS:
        fork.is_clear.wait(_FORK_SECONDS)


def _after_fork() -> None:
    while _FORKS:
        _FORKS.pop().is_over.set()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_FORKS.clear)
