"""An aggregator of this host for the workers of one user: the first of them starts it, the others find it.

It is a process of its own, `gradserve serve --upstream`, at a Unix socket in a folder that nobody else can enter. Who
uses it holds a shared lock on a file there; it ends by itself some time after the last of them has let go or has died.
"""

import importlib.util
import os
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import IO

from gradserve_protocol.argument import Argument
from gradserve_protocol.errors import InvalidArgumentError, UnavailableError
from gradserve_protocol.tls import TLS
from gradserve_protocol.variables import (
    BULK_SOCKETS_VARIABLE,
    LOCAL_AGGREGATOR_VARIABLE,
    RESTART_PATIENCE_VARIABLE,
    TLS_FILE_VARIABLES,
    TLS_VARIABLE,
    TOKEN_VARIABLE,
)

_MOST_WORKERS = 1024
_START_SECONDS = 60.0
_LOOK_SECONDS = 0.02
_IDLE_SECONDS = 60.0
_OURS = "GRADSERVE_"
_PASSED_ON = (BULK_SOCKETS_VARIABLE, RESTART_PATIENCE_VARIABLE, TOKEN_VARIABLE)
"""Variables of the worker that are meant for connections upstream, too."""
_START = """
import subprocess, sys
log = open(sys.argv[1], "ab")
print(subprocess.Popen(sys.argv[2:], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True).pid)
"""
"""A program that starts another one and ends, so that the other is nobody's child: it outlives the worker."""


def wanted_workers(given: object, environment: Mapping[str, str]) -> int | None:
    """Returns the number of workers for which an aggregator is wanted: an argument, or GRADSERVE_LOCAL_AGGREGATOR.

    Args:
        given: The argument; None if it was not given.
        environment: The environment variables.

    Raises:
        InvalidArgumentError: It is no such number.
    """
    expected = f"a whole number of workers from 1 to {_MOST_WORKERS}"
    if given is not None:
        if isinstance(given, bool) or not isinstance(given, int) or not 1 <= given <= _MOST_WORKERS:
            raise Argument("local_aggregator").error(expected, given)
        return given
    text = environment.get(LOCAL_AGGREGATOR_VARIABLE)
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= _MOST_WORKERS):
        raise Argument(LOCAL_AGGREGATOR_VARIABLE).error(expected, text)
    return int(text)


class LocalAggregator:
    """The aggregator that a client uses, until the client closes it.

    Attributes:
        address: Its address.
    """

    def __init__(
        self,
        upstream: str | Sequence[str],
        num_workers: int,
        tls: TLS | None,
        token: str | None,
        environment: Mapping[str, str],
    ) -> None:
        """Finds the aggregator of this host, or starts it, and waits until it serves.

        Args:
            upstream: The address of the server, or of several.
            num_workers: How many gradients go together.
            tls: What encrypts connections upstream.
            token: The token for the server upstream; None for what the environment says.
            environment: The environment variables.

        Raises:
            InvalidArgumentError: The server's part of gradserve is not installed here, or the system has no file locks.
            UnavailableError: It does not start; the message has the last line of its log.
        """
        _check_installed()
        import fcntl

        address = upstream if isinstance(upstream, str) else ",".join(upstream)
        variables = _variables(tls, token, environment)
        folder = _private_folder(_name_of(address, num_workers, variables))
        self.address = f"unix:{folder / 'socket'}"
        self._users: IO[bytes] = (folder / "users").open("ab")
        try:
            # First, so that one that runs does not end now; one that is about to end is waited for.
            fcntl.flock(self._users, fcntl.LOCK_SH)
            with (folder / "starting").open("ab") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not _is_serving(folder / "socket"):
                    _start(folder, address, num_workers, variables)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Lets the aggregator end if nobody else uses it. Can be called again."""
        self._users.close()


def aggregator_for(
    upstream: str | Sequence[str],
    given: object,
    tls: TLS | None,
    token: str | None,
    environment: Mapping[str, str],
) -> LocalAggregator | None:
    """Returns the aggregator that an argument of `connect`, or GRADSERVE_LOCAL_AGGREGATOR, asks for; None for none.

    Raises:
        GradserveError: The number is not valid; or see `LocalAggregator`.
    """
    num_workers = wanted_workers(given, environment)
    return None if num_workers is None else LocalAggregator(upstream, num_workers, tls, token, environment)


def _check_installed() -> None:
    for module in ("gradserve_server", "click", "pydantic", "grpc_health"):
        if importlib.util.find_spec(module) is None:
            raise InvalidArgumentError(
                "a local aggregator is a gradserve server on this host, which is not installed here: "
                "in a checkout of gradserve, pip install '.[server]'",
                field="local_aggregator",
            )
    if importlib.util.find_spec("fcntl") is None:
        raise InvalidArgumentError(
            "a local aggregator needs file locks (flock), which this system does not have", field="local_aggregator"
        )


def _variables(tls: TLS | None, token: str | None, environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of the aggregator: that of the worker, with what is for connections upstream."""
    variables = {name: value for name, value in environment.items() if not name.startswith(_OURS) or name in _PASSED_ON}
    if token is not None:
        variables[TOKEN_VARIABLE] = token
    if tls is not None:
        variables[TLS_VARIABLE] = "1"
        files = {variable: getattr(tls, name) for name, variable in TLS_FILE_VARIABLES.items()}
        variables |= {name: os.path.abspath(os.fspath(file)) for name, file in files.items() if file is not None}
    return variables


def _name_of(address: str, num_workers: int, variables: Mapping[str, str]) -> str:
    """Returns the same name for workers that can share an aggregator, and for no others."""
    ours = sorted((name, value) for name, value in variables.items() if name.startswith(_OURS))
    what = (address, num_workers, ours, sys.executable, sys.path)
    return blake2b(repr(what).encode(), digest_size=8).hexdigest()


def _private_folder(name: str) -> Path:
    """Returns a folder of this name that only this user can enter.

    Raises:
        UnavailableError: Somebody else has made it, or it cannot be made.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    base = runtime if os.access(runtime, os.W_OK | os.X_OK) else tempfile.gettempdir()
    folder = Path(base) / f"gradserve-aggregators-{os.getuid()}" / name
    try:
        for each in (folder.parent, folder):
            with suppress(FileExistsError):
                each.mkdir(mode=0o700)
            found = each.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
                raise UnavailableError(
                    f"expected {each} to be a folder that only this user can enter, for the local aggregator; "
                    "XDG_RUNTIME_DIR can name another place for it, the same for all workers",
                    code="GS_LOCAL_AGGREGATOR",
                )
    except OSError as error:
        raise UnavailableError(
            f"the folder of the local aggregator, {folder}, cannot be made: {error}", code="GS_LOCAL_AGGREGATOR"
        ) from None
    return folder


def _is_serving(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(str(path))
        except OSError:
            return False
    return True


def _start(folder: Path, address: str, num_workers: int, variables: Mapping[str, str]) -> None:
    log, ready = folder / "log", folder / "addresses"
    log.unlink(missing_ok=True)
    ready.unlink(missing_ok=True)
    flags = {
        "--listen": f"unix:{folder / 'socket'}",
        "--http-listen": "off",
        "--device": "cpu",
        "--address-file": str(ready),
        "--upstream": address,
        "--upstream-workers": str(num_workers),
        "--upstream-users-file": str(folder / "users"),
        "--upstream-idle-seconds": str(_IDLE_SECONDS),
    }
    command = [sys.executable, "-m", "gradserve_server", "serve"]
    for name, value in flags.items():
        command += [name, value]
    path = os.pathsep.join([*filter(None, sys.path)])
    starter = subprocess.run(
        [sys.executable, "-c", _START, str(log), *command],
        env={**variables, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        check=True,
    )
    _wait_until(ready.exists, int(starter.stdout), log)


def _wait_until(is_ready: Callable[[], bool], pid: int, log: Path) -> None:
    end = time.monotonic() + _START_SECONDS
    while not is_ready():
        if not _is_running(pid) or time.monotonic() > end:
            lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            reason = lines[-1] if lines else "it has said nothing"
            raise UnavailableError(
                f"the local aggregator did not start: {reason}; its log is {log}", code="GS_LOCAL_AGGREGATOR"
            )
        time.sleep(_LOOK_SECONDS)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
