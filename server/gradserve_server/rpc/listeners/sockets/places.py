"""The places where a server's sockets listen."""

import contextlib
import logging
import os
import secrets
import socket
import stat
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from gradserve.address import Address
from gradserve.errors import InvalidArgumentError
from gradserve_server.config import ListenConfig
from gradserve_server.rpc.listeners.sockets.listener import SocketListener
from gradserve_server.rpc.sockets.addresses import SocketAddresses

_log = logging.getLogger(__name__)


def bind_sockets(
    listener: SocketListener, config: ListenConfig, grpc_addresses: Sequence[Address], found: SocketAddresses
) -> None:
    """Binds the sockets of a server, and notes where they are.

    Args:
        listener: The listener.
        config: What was asked for.
        grpc_addresses: Where the server listens for gRPC.
        found: Gets the addresses.

    Raises:
        OSError: An address or path that was asked for cannot be bound. Those chosen by `auto` are left out then.
    """
    found.tcp = _bind_tcp(listener, config.bulk_listen, grpc_addresses)
    if config.shared_memory_socket not in ("auto", "off"):
        found.unix_path = str(listener.bind_unix(Path(config.shared_memory_socket)))
    elif config.shared_memory_socket == "auto" and hasattr(os, "memfd_create"):
        found.unix_path = _bind_unix(listener, grpc_addresses)


def _bind_tcp(listener: SocketListener, wanted: str, grpc_addresses: Sequence[Address]) -> list[Address]:
    if wanted == "off":
        return []
    if wanted != "auto":
        address = Address.to_listen(wanted)
        bound = listener.bind_tcp(address.host, address.port)
        return [_public(each, grpc_addresses) for each in bound]
    ports: list[Address] = []
    for host in dict.fromkeys(each.host for each in grpc_addresses if each.host):
        try:
            ports += [_public(each, grpc_addresses) for each in listener.bind_tcp(host, 0)]
        except OSError as error:
            _log.warning("no bulk socket: %s", error)
    return ports


def _public(address: Address, grpc_addresses: Sequence[Address]) -> Address:
    """Leaves out the host if clients know a better one: that under which they reach the server over gRPC."""
    same = any(each.host == address.host for each in grpc_addresses)
    return Address("", address.port) if same or address.host in ("0.0.0.0", "::") else address


def _bind_unix(listener: SocketListener, grpc_addresses: Sequence[Address]) -> str:
    problems: list[str] = []
    for path in _candidates(grpc_addresses, problems):
        try:
            Address.to_listen(f"unix:{path}")
            return str(listener.bind_unix(Path(path)))
        except (InvalidArgumentError, OSError) as error:  # the former: it is too long
            problems.append(str(error))
    _log.warning(
        "no shared memory for clients of this machine, which take slower ways: %s; --shared-memory-socket PATH names a "
        "place for its socket, and off does without it",
        "; ".join(problems),
    )
    return ""


def _candidates(grpc_addresses: Sequence[Address], problems: list[str]) -> Iterator[str]:
    for each in grpc_addresses:
        if each.path:
            yield f"{each.path}.shm"
    try:
        folder = _runtime_folder()
    except OSError as error:
        problems.append(str(error))
    else:
        yield str(folder / f"{secrets.token_hex(8)}.sock")


def _runtime_folder() -> Path:
    """Returns a folder that only this user can enter, without sockets that servers have left behind.

    Clients learn its name over gRPC. So if somebody else has taken the usual name first, another one does as well, one
    that nobody can know beforehand; later servers of this user find that again.

    Raises:
        OSError: There is none, and none can be made.
    """
    base = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    usual = base / f"gradserve-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        usual.mkdir(mode=0o700)
    own = [each for each in (usual, *sorted(base.glob(f"{usual.name}-*"))) if _is_private(each)]
    for each in own:
        _remove_dead(each)
    return own[0] if own else Path(tempfile.mkdtemp(prefix=f"{usual.name}-", dir=base))


def _is_private(folder: Path) -> bool:
    """True if it is a folder of this user that nobody else can enter."""
    try:
        status = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077


def _remove_dead(folder: Path) -> None:
    for path in folder.glob("*.sock"):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
            probe.setblocking(False)
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
