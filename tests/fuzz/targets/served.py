"""A server that recorded and mutated requests are sent to."""

import gc
import logging
import os
from collections.abc import Sequence
from typing import Any, Self

import grpc
import psutil

from gradserve_testing import LocalServer
from tests.fuzz.targets.recording import ALONE, MAX_BYTES, Recording
from tests.fuzz.targets.target import Found
from tests.servers.polling import PATIENCE_SECONDS, eventually
from tests.servers.raw_calls import METHODS, RawCalls

WAITING = frozenset(
    {"TakeGradient", "ReadAverage", "PushPull", "HoldClientLease", "PushPullParameters", "ReadParameters"}
)
"""The methods that wait for others, as long as their client does."""
_DELETING = frozenset(
    {"DeleteAccumulator", "DeleteBatchNormLayer", "DeleteParameters", "DeleteTensors", "EndClientLease"}
)
_NOT_FINE = (
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.DATA_LOSS,
)
NOT_FINE = frozenset(code.value[0] for code in _NOT_FINE)
"""The codes with which no request may end."""
WAIT_SECONDS = 0.05
HANG_SECONDS = PATIENCE_SECONDS
_SLACK_BYTES = 256 << 20


class _Errors(logging.Handler):
    """Keeps what a server logs as an error."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(self.format(record))


class Served:
    """Runs a server, with everything on it that recorded requests use."""

    def __init__(self, recording: Recording = ALONE) -> None:
        self._recording = recording
        self._errors = _Errors()
        self._local: LocalServer
        self.raw: RawCalls

    @property
    def local(self) -> LocalServer:
        return self._local

    def __enter__(self) -> Self:
        logging.getLogger("gradserve_server").addHandler(self._errors)
        self._start()
        self._resident = psutil.Process(os.getpid()).memory_info().rss
        return self

    def __exit__(self, *_exception: object) -> None:
        self._stop()
        logging.getLogger("gradserve_server").removeHandler(self._errors)

    def call(self, method: str, requests: Sequence[bytes]) -> None:
        """Makes a call with any requests, which may fail, but not in any way."""
        timeout = WAIT_SECONDS if method in WAITING else HANG_SECONDS
        try:
            call = self.raw.start(method, *requests, timeout=timeout)
            if METHODS[method].server_streaming:
                for _ in call:
                    pass
            else:
                call.result()
        except grpc.RpcError as error:
            failed: Any = error
            code = failed.code()
            if code.value[0] in NOT_FINE or (code is grpc.StatusCode.DEADLINE_EXCEEDED and method not in WAITING):
                raise Found(f"{method} ended with {code.name}: {failed.details()}") from None
        self.check_log()

    def check_log(self) -> None:
        """Raises Found if the server has logged an error."""
        if self._errors.texts:
            texts, self._errors.texts = self._errors.texts, []
            raise Found("\n".join(texts))

    def check(self) -> None:
        """Ends the server, looks whether anything is left of it, and goes on with a fresh one."""
        self._stop()
        gc.collect()
        resident = psutil.Process(os.getpid()).memory_info().rss
        if resident > self._resident + 1.25 * MAX_BYTES + _SLACK_BYTES:
            raise Found(f"the process grew from {self._resident >> 20} MiB to {resident >> 20} MiB")
        self._start()

    def _start(self) -> None:
        self._local = self._recording.server()
        self._local.__enter__()
        self.raw = RawCalls(self._local.address)
        for method, request in self._recording.calls():
            if method not in WAITING | _DELETING:
                self.call(method, [request])

    def _stop(self) -> None:
        self.raw.channel.close()
        local = self._local
        try:
            eventually(lambda: local.inspect(lambda server: server.registry.factory.waiters.used), (0).__eq__)
            eventually(lambda: local.inspect(lambda server: len(server.sockets.connections)), (0).__eq__)
            eventually(lambda: local.inspect(lambda server: server.sockets.context.in_flight.used), (0).__eq__)
        except AssertionError as error:
            raise Found(f"calls, connections or payloads stay though their clients have gone: {error}") from None
        finally:
            local.__exit__()
