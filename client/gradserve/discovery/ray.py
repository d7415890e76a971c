"""The servers of a cluster on Ray, and the connection to Ray. Imports Ray only for a lookup."""

import logging
import math
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

from gradserve_protocol.errors import DeadlineExceededError, InvalidArgumentError, NotFoundError, UnavailableError

NAMESPACE = "gradserve"
"""The Ray namespace of all actors of clusters."""

_NAME = re.compile(r"([A-Za-z0-9._-]{1,63})/?")
_LOOK_SECONDS = 0.2

_connecting = threading.RLock()
"""Held by the thread that has connected this process to Ray: other threads must not find and use its connection."""


def servers_on_ray(cluster: str, timeout: float) -> list[str]:
    """Returns the addresses of the servers of a cluster that `gradserve cluster up` has started, in their order.

    Waits until all of them have been up. Uses the process's connection to Ray; otherwise connects for the lookup.

    Args:
        cluster: The name of the cluster.
        timeout: Seconds to wait until all of its servers are up; math.inf for no limit.

    Raises:
        InvalidArgumentError: The name is not valid, or Ray is not installed.
        NotFoundError: There is no cluster of this name.
        UnavailableError: There is no Ray, or it refuses this process.
        DeadlineExceededError: Not all servers were up in time.
    """
    match = _NAME.fullmatch(cluster)
    if match is None:
        raise InvalidArgumentError(
            f"expected gradserve+ray://NAME with a name of 1 to 63 letters, digits, or ._-, got "
            f"{f'gradserve+ray://{cluster}'!r}",
            field="address",
        )
    try:
        import ray  # noqa: F401  in this order: it may be missing although its parts have been imported
        from ray.exceptions import GetTimeoutError, RayError
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "ray":
            raise
        raise InvalidArgumentError(
            "address: gradserve+ray:// needs Ray; install it in a checkout of gradserve with: pip install '.[ray]'",
            field="address",
        ) from None
    name = match[1]
    end = time.monotonic() + timeout
    try:
        with connected_to_ray():
            return _look_up(name, timeout, end)
    except GetTimeoutError:
        raise DeadlineExceededError(f"the directory of cluster {name!r} on Ray did not answer in time") from None
    except RayError as error:
        raise UnavailableError(f"Ray does not tell where cluster {name!r} is: {error}", code="GS_RAY") from None


@contextmanager
def connected_to_ray(address: str | None = None) -> Iterator[None]:
    """Connects this process to Ray until the end of the block, unless it is connected already.

    A process that stayed connected would end with Ray's head, and could not connect to another Ray. Inside the block,
    standard output goes to standard error, because Ray prints events of nodes there, from its own thread.

    Args:
        address: The address of Ray's head; None for that in RAY_ADDRESS, or else a Ray on this machine.

    Raises:
        UnavailableError: There is no such Ray, or its token is missing or wrong.
    """
    import ray
    from ray.exceptions import RayError

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
                    "RAY_AUTH_MODE=token that it has a token",
                    code="GS_RAY",
                ) from None
            finally:
                if threading.current_thread() is threading.main_thread():
                    signal.signal(signal.SIGTERM, on_sigterm)
            try:
                yield
            finally:
                ray.shutdown()


def directory_name(cluster: str) -> str:
    """Returns the name of the actor that knows the addresses of a cluster's servers.

    Its method `addresses` returns them as a list of texts, in the order of the servers; "" for a server that is not up.
    """
    return f"gradserve:{cluster}"


def _look_up(cluster: str, timeout: float, end: float) -> list[str]:
    import ray

    try:
        directory: Any = ray.get_actor(directory_name(cluster), namespace=NAMESPACE)
    except ValueError:
        raise NotFoundError(
            f"no cluster {cluster!r} on this Ray: `gradserve cluster up --name {cluster} --servers N` starts one",
            field="address",
            code="GS_NO_CLUSTER",
        ) from None
    pause = threading.Event()
    while True:
        remaining = end - time.monotonic()
        waiting = None if remaining == math.inf else max(remaining, _LOOK_SECONDS)
        addresses: list[str] = ray.get(directory.addresses.remote(), timeout=waiting)
        missing = [str(index) for index, each in enumerate(addresses) if not each]
        if not missing:
            return addresses
        if remaining <= 0:
            raise DeadlineExceededError(
                f"after {timeout:g} s, these of the {len(addresses)} servers of cluster {cluster!r} are not up yet: "
                f"{', '.join(missing)}; `gradserve cluster status {cluster}` shows what they are doing",
                code="GS_SERVERS_NOT_UP",
            )
        pause.wait(_LOOK_SECONDS)
