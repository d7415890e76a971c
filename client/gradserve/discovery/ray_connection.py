"""Connects this process to Ray for a while. Needs the extra `ray`."""

import logging
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout

import ray
from ray.exceptions import RayError

from gradserve.discovery.ray_names import NAMESPACE
from gradserve.errors import UnavailableError

_connecting = threading.RLock()
"""Held by the thread that has connected this process to Ray: others must not find it connected, and use it."""


@contextmanager
def connected_to_ray(address: str | None = None) -> Iterator[None]:
    """Connects this process to Ray until the end of the block, unless it is connected already.

    A process that stayed connected would end when Ray's head does, and could not connect to another Ray. Meanwhile
    standard output goes to standard error: Ray prints there what happens to nodes, from a thread of its own.

    Args:
        address: Where Ray's head is; None for what RAY_ADDRESS says, or else a Ray that runs on this machine.

    Raises:
        UnavailableError: There is no such Ray, or its token is missing or wrong.
    """
    with _connecting:
        if ray.is_initialized():
            yield
            return
        with redirect_stdout(sys.stderr):
            on_sigterm = signal.getsignal(signal.SIGTERM)
            try:
                ray.init(
                    address=address or "auto",
                    namespace=NAMESPACE,
                    ignore_reinit_error=True,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                )
            except (ConnectionError, RayError, RuntimeError, ValueError) as error:
                raise UnavailableError(
                    f"cannot connect to Ray: {error}; RAY_ADDRESS=HOST:PORT says where its head is, "
                    "RAY_AUTH_MODE=token that it has a token"
                ) from None
            finally:
                if threading.current_thread() is threading.main_thread():
                    signal.signal(signal.SIGTERM, on_sigterm)
            try:
                yield
            finally:
                ray.shutdown()
