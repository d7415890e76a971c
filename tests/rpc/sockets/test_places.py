"""Where a server's sockets are, and what is said of them."""

import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

import gradserve
from gradserve_protocol.memory.sealed import machine_id
from gradserve_protocol.v1 import server_messages_pb2
from gradserve_server.app import Server
from gradserve_server.config import ListenConfig, ServerConfig
from gradserve_testing import LocalServer
from gradserve_testing.server_process import free_port
from tests.rpc.sockets.conftest import connector
from tests.rpc.sockets.test_broken_rules import answers
from tests.servers.frames import issue_ticket
from tests.servers.raw_calls import RawCalls
from tests.servers.runtime import NOT_WARMED_UP


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A folder with a short name: a socket's path has at most 101 bytes."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.fixture(autouse=True)
def runtime_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which servers of this file put sockets by themselves."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / f"gradserve-{os.getuid()}"


def config(**listen: Any) -> ServerConfig:
    return ServerConfig(runtime=NOT_WARMED_UP, listen=ListenConfig(listen=("127.0.0.1:0",), **listen))


def info(local: LocalServer) -> Any:
    with RawCalls(local.address) as raw:
        return raw.call("GetServerInfo", server_messages_pb2.GetServerInfoRequest()).sockets


def test_by_itself_a_server_has_both(runtime_folder: Path) -> None:
    with LocalServer(config()) as local:
        addresses = info(local)
        assert addresses == issue_ticket(local.address).addresses
        (tcp,) = addresses.tcp
        assert tcp.host == "", "that of the gRPC address"
        assert str(tcp.port) != local.address.rpartition(":")[2]
        assert addresses.machine == machine_id()
        assert Path(addresses.unix_path).parent == runtime_folder
        assert stat.S_IMODE(runtime_folder.stat().st_mode) == 0o700
        for way in ("bulk", "shared_memory"):
            with connector(local, way)() as client:
                assert answers(client)
    assert list(runtime_folder.iterdir()) == []


def test_neither(runtime_folder: Path) -> None:
    with LocalServer(config(bulk_listen="off", shared_memory_socket="off")) as local:
        addresses = info(local)
        assert (list(addresses.tcp), addresses.unix_path) == ([], "")
        assert local.inspect(lambda each: each.sockets._sockets) == []
    assert not runtime_folder.exists()


def test_chosen_places(tmp_path: Path) -> None:
    port, path = free_port(), tmp_path / "shm"
    with LocalServer(config(bulk_listen=f"localhost:{port}", shared_memory_socket=str(path))) as local:
        addresses = info(local)
        assert [(each.host, each.port) for each in addresses.tcp] == [("localhost", port)]
        assert addresses.unix_path == str(path)
        for way in ("bulk", "shared_memory"):
            with connector(local, way)() as client:
                assert answers(client)
    assert not path.exists()


def test_every_address_has_no_host_of_its_own() -> None:
    with LocalServer(config(bulk_listen="0.0.0.0:0")) as local:
        (tcp,) = info(local).tcp
        assert tcp.host == ""
        for host in ("127.0.0.1", "localhost"):
            socket.create_connection((host, tcp.port)).close()


def message_of(failed: BaseException | None) -> str:
    assert failed is not None
    return str(failed.__cause__)


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(RuntimeError) as error, LocalServer(config(bulk_listen=address)):
            pass
    assert message_of(error.value) == f"cannot listen on {address}: address already in use"


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: path.write_text("precious"), "exists and is not a socket"),
        (lambda path: path.mkdir(), "exists and is not a socket"),
    ],
    ids=["file", "directory"],
)
def test_a_path_that_is_taken(tmp_path: Path, make: Any, reason: str) -> None:
    path = tmp_path / "shm"
    make(path)
    with pytest.raises(RuntimeError) as error, LocalServer(config(shared_memory_socket=str(path))):
        pass
    assert f"cannot listen on unix:{path}: " in message_of(error.value)
    assert reason in message_of(error.value)
    assert path.exists()


def test_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    path = tmp_path / "none" / "shm"
    with pytest.raises(RuntimeError) as error, LocalServer(config(shared_memory_socket=str(path))):
        pass
    assert f"cannot listen on unix:{path}: " in message_of(error.value)


def test_what_a_dead_server_left_is_swept(runtime_folder: Path) -> None:
    runtime_folder.mkdir(mode=0o700)
    dead, ordinary = runtime_folder / "dead.sock", runtime_folder / "file.sock"
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(dead))
    with LocalServer(config()) as first, LocalServer(config()) as second:
        paths = {info(first).unix_path, info(second).unix_path}
        assert {str(each) for each in runtime_folder.iterdir()} == paths
    assert not ordinary.exists()


def test_a_socket_at_a_chosen_path_that_nobody_listens_on_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "shm"
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))
    with LocalServer(config(shared_memory_socket=str(path))) as local, connector(local, "shared_memory")() as client:
        assert answers(client)


def open_to_others(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o770)


def link(folder: Path) -> None:
    (folder.parent / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(folder.parent / "elsewhere")


@pytest.mark.parametrize(
    "make", [open_to_others, link, lambda folder: folder.write_text("")], ids=["open", "link", "file"]
)
def test_a_folder_that_others_can_enter_is_not_used(
    runtime_folder: Path, make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever takes the name first switches nothing off: another folder does as well, for later servers too."""
    make(runtime_folder)
    with LocalServer(config()) as first, LocalServer(config()) as second:
        folders = [Path(info(each).unix_path).parent for each in (first, second)]
        assert folders[0] == folders[1] != runtime_folder
        assert folders[0].name.startswith(f"{runtime_folder.name}-")
        assert stat.S_IMODE(folders[0].stat().st_mode) == 0o700
        with connector(first, "shared_memory")() as client:
            assert answers(client)
    with LocalServer(config()) as third:
        assert Path(info(third).unix_path).parent == folders[0]
    assert list(folders[0].iterdir()) == []
    assert "shared memory" not in caplog.text


def test_nobody_elses_folder_is_used(tmp_path: Path, runtime_folder: Path) -> None:
    others = [runtime_folder, tmp_path / f"{runtime_folder.name}-guessed"]
    for each in others:
        open_to_others(each)
    with LocalServer(config()) as local:
        assert Path(info(local).unix_path).parent not in others


def too_long(folder: Path) -> Path:
    long = folder / ("x" * 100)
    long.mkdir()
    return long


@pytest.mark.parametrize(
    ("place", "reason"),
    [(too_long, "at most"), (lambda folder: folder / "nowhere", "No such file or directory: ")],
    ids=["too long", "not there"],
)
def test_without_a_folder_there_is_a_warning_that_says_what_to_do(
    tmp_path: Path, place: Any, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(place(tmp_path)))
    with LocalServer(config()) as local, gradserve.connect(local.address) as client:
        assert info(local).unix_path == ""
        assert client.server_info().transport.why_not_faster == "shared_memory: the server has no socket for it"
    (warning,) = [each.getMessage() for each in caplog.records if "no shared memory" in each.getMessage()]
    assert reason in warning
    assert "--shared-memory-socket PATH names a place" in warning


async def test_beside_a_unix_socket_of_grpc(tmp_path: Path) -> None:
    listen = ListenConfig(listen=(f"unix:{tmp_path}/grpc", "127.0.0.1:0"))
    async with Server(ServerConfig(runtime=NOT_WARMED_UP, listen=listen)) as server:
        found = server.socket_addresses
        assert found.unix_path == f"{tmp_path}/grpc.shm"
        assert [each.host for each in found.tcp] == [""]
    assert os.listdir(tmp_path) == []


async def test_beside_a_unix_socket_what_is_in_the_way_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "grpc.shm").write_text("precious")
    listen = ListenConfig(listen=(f"unix:{tmp_path}/grpc",))
    async with Server(ServerConfig(runtime=NOT_WARMED_UP, listen=listen)) as server:
        assert Path(server.socket_addresses.unix_path).parent == tmp_path / f"gradserve-{os.getuid()}"
        assert list(server.socket_addresses.tcp) == []
    assert (tmp_path / "grpc.shm").read_text() == "precious"


@pytest.mark.parametrize(
    "listen",
    [
        {"bulk_listen": "unix:/a"},
        {"bulk_listen": "a:99999"},
        {"shared_memory_socket": ""},
        {"shared_memory_socket": "/" + "x" * 200},
    ],
)
def test_places_that_are_none(listen: Any) -> None:
    with pytest.raises((ValidationError, ValueError)):
        config(**listen)


def test_a_bulk_port_that_cannot_be_bound_by_itself_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from gradserve_server.rpc.listeners.sockets import listener

    def fail(_host: str, _port: int) -> list[socket.socket]:
        raise OSError(13, "no ports today")

    monkeypatch.setattr(listener, "_bound", fail)
    with LocalServer(config()) as local:
        assert list(info(local).tcp) == []


def test_a_host_that_is_elsewhere() -> None:
    with pytest.raises(RuntimeError) as error, LocalServer(config(bulk_listen="192.0.2.1:0")):
        pass
    assert "cannot listen on 192.0.2.1:0: " in message_of(error.value)
