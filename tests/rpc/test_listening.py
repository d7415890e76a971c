"""Where a server listens: why it cannot, whose socket a path is, and the file that says where."""

import errno
import os
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path

import pytest

import gradserve.aio
from gradserve_server.app import Server
from gradserve_server.config import ListenConfig, RuntimeConfig, ServerConfig
from gradserve_server.parts import Parts
from gradserve_server.rpc.listeners.grpc.endpoint import LOOPBACKS
from gradserve_server.rpc.listeners.grpc.listener import GrpcListener
from gradserve_server.runtime.files import OwnedFile, bind_socket_file
from gradserve_testing.server_process import free_port
from tests.servers.command_line import run_cli
from tests.servers.polling import PATIENCE_SECONDS


def server_on(*addresses: str, address_file: Path | None = None, loopbacks: tuple[str, ...] = LOOPBACKS) -> Server:
    listen = ListenConfig(listen=addresses, address_file=None if address_file is None else str(address_file))
    runtime = RuntimeConfig(device="cpu", warm_up=False, drain_seconds=1)
    parts = Parts(make_listener=partial(GrpcListener, loopbacks=loopbacks))
    return Server(ServerConfig(listen=listen, runtime=runtime), parts)


async def failure_of(server: Server) -> str:
    """Returns why a server cannot start."""
    with pytest.raises(OSError) as raised:  # noqa: PT011 - the message is compared
        await server.__aenter__()
    return str(raised.value)


@contextmanager
def taken(host: str = "127.0.0.1") -> Iterator[int]:
    """A port that somebody else listens on."""
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        yield listener.getsockname()[1]


def listening(path: Path, backlog: int = 1) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(backlog)
    return listener


async def answers(address: str) -> bool:
    async with gradserve.aio.connect(address, timeout=PATIENCE_SECONDS) as client:
        return (await client.server_info()).uptime >= 0


# --- Starting


def test_serve_says_in_one_line_why_it_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRPC_VERBOSITY", raising=False)
    with taken() as port:
        done = run_cli("serve", "--listen", f"127.0.0.1:{port}")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"Error: cannot listen on 127.0.0.1:{port}: address already in use\n"


def test_with_the_log_level_debug_grpc_tells_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRPC_VERBOSITY", raising=False)
    (tmp_path / "gradserve.toml").write_text('log_level = "debug"')
    with taken() as port:
        done = run_cli("serve", "--listen", f"127.0.0.1:{port}", "--config", f"{tmp_path}/gradserve.toml")
    assert "Failed to add port to server" in done.stderr
    assert f"Error: cannot listen on 127.0.0.1:{port}: address already in use\n" in done.stderr


@pytest.mark.exhaustive
def test_with_the_log_level_debug_numba_tells_no_more() -> None:
    """It would write a megabyte for each kernel."""
    program = """if True:
        import contextlib, logging, sys
        from gradserve_server.commands.cli import cli
        with contextlib.suppress(SystemExit):
            cli(["serve", "--log-level", "debug", "--listen", sys.argv[1]])
        print([name for name in ("gradserve_server", "numba.core") if logging.getLogger(name).isEnabledFor(10)])
    """
    with taken() as port:
        done = subprocess.run([sys.executable, "-c", program, f"127.0.0.1:{port}"], capture_output=True, text=True)
    assert done.stdout == "['gradserve_server']\n"


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_a_port_that_is_in_use_on_one_address_of_the_host(host: str) -> None:
    """Clients of localhost could reach either server."""
    with ExitStack() as stack:
        try:
            port = stack.enter_context(taken(host))
        except OSError as error:
            pytest.skip(f"this machine has no {host}: {error}")
        assert await failure_of(server_on(f"localhost:{port}")) == (
            f"cannot listen on localhost:{port}: address already in use"
        )


async def test_localhost_is_one_port_on_all_its_addresses() -> None:
    async with server_on("localhost:0") as server:
        (address,) = server.addresses
        port = address.removeprefix("localhost:")
        assert int(port) > 0
        hosts = [host for host in ("127.0.0.1", "[::1]") if has(host)]
        for host in ("localhost", *hosts):
            assert await answers(f"{host}:{port}")


def has(host: str) -> bool:
    try:
        with taken(host.strip("[]")):
            return True
    except OSError:
        return False


@pytest.mark.parametrize("hosts", [("127.0.0.1", "198.51.100.1"), ("198.51.100.1", "127.0.0.1")])
async def test_an_address_of_a_host_that_the_machine_does_not_have(
    hosts: tuple[str, ...],
) -> None:
    """As localhost has two where there is no IPv6."""
    async with server_on("localhost:0", loopbacks=hosts) as server:
        assert await answers(server.addresses[0])
    absent = ("198.51.100.1", "198.51.100.2")
    assert await failure_of(server_on("localhost:0", loopbacks=absent)) == (
        "cannot listen on localhost:0: cannot assign requested address"
    )


def test_a_missing_port_is_50051() -> None:
    assert ListenConfig(listen=("127.0.0.1",)).listen == ("127.0.0.1:50051",)


async def test_nothing_is_left_of_a_start_that_failed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    addresses = [f"unix:{tmp_path}/socket", f"127.0.0.1:{free_port()}"]
    with taken() as port:
        await failure_of(server_on(*addresses, f"127.0.0.1:{port}", address_file=tmp_path / "addresses"))
    assert os.listdir(tmp_path) == []
    assert "draining" not in caplog.text
    async with server_on(*addresses) as server:
        assert server.addresses == tuple(addresses)


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("gradserve.invalid:1", "name or service not known"),
        ("198.51.100.1:0", "cannot assign requested address"),
        ("unix:{}/nowhere/socket", "no such file or directory"),
        ("unix:{}", "{} exists and is not a socket"),
    ],
)
async def test_an_address_that_is_not_to_be_had(tmp_path: Path, address: str, reason: str) -> None:
    address, reason = address.format(tmp_path), reason.format(tmp_path)
    assert await failure_of(server_on(address)) == f"cannot listen on {address}: {reason}"


# --- The file of a Unix socket


async def test_a_second_server_leaves_a_living_ones_socket_alone(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/socket"
    async with server_on(address):
        assert await failure_of(server_on(address)) == f"cannot listen on {address}: address already in use"
        assert await answers(address)
    assert os.listdir(tmp_path) == []


def test_one_of_several_that_start_together_gets_the_path(tmp_path: Path) -> None:
    path, num_servers, num_rounds = tmp_path / "socket", 4, 20
    start = threading.Barrier(num_servers)
    losses: list[int | None] = []

    def compete(stack: ExitStack) -> OwnedFile | None:
        start.wait(PATIENCE_SECONDS)
        try:
            return bind_socket_file(path, lambda beside: stack.callback(listening(beside).close))
        except OSError as error:
            losses.append(error.errno)
            return None

    with ThreadPoolExecutor(num_servers) as threads:
        for _ in range(num_rounds):  # from the second on, they find what the winner of the one before left
            with ExitStack() as stack:
                (winner,) = filter(None, threads.map(compete, [stack] * num_servers))
                assert os.listdir(tmp_path) == ["socket"]
            os.close(winner._descriptor)
    assert losses == [errno.EADDRINUSE] * (num_servers - 1) * num_rounds


async def test_what_a_killed_server_left_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    listening(path).close()
    assert stat.S_ISSOCK(path.stat().st_mode)
    async with server_on(f"unix:{path}"):
        assert await answers(f"unix:{path}")
    assert not path.exists()


async def test_a_socket_whose_queue_is_full_is_in_use(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with ExitStack() as stack:
        stack.enter_context(closing(listening(path, backlog=0)))
        while True:
            client = stack.enter_context(socket.socket(socket.AF_UNIX))
            client.setblocking(False)
            try:
                client.connect(str(path))
            except BlockingIOError:
                break
        assert "address already in use" in await failure_of(server_on(f"unix:{path}"))


@pytest.mark.parametrize("kind", ["file", "folder", "link", "dangling link"])
async def test_what_is_no_socket_is_left_untouched(tmp_path: Path, kind: str) -> None:
    path, target = tmp_path / "socket", tmp_path / "target"
    if kind == "file":
        path.write_text("precious")
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(target)
    if kind == "link":
        target.write_text("precious")
    before = path.lstat()
    assert await failure_of(server_on(f"unix:{path}")) == (
        f"cannot listen on unix:{path}: {path} exists and is not a socket"
    )
    assert path.lstat() == before
    if kind in ("file", "link"):
        assert path.read_text() == "precious"


async def test_another_ones_socket_at_the_path_outlives_the_server(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    address = f"unix:{path}"
    first, second = server_on(address), server_on(address)
    async with first:
        path.unlink()
        await second.__aenter__()
        assert await answers(address)
    assert await answers(address)
    await second.__aexit__()
    assert not path.exists()


async def test_a_path_is_free_as_soon_as_its_server_drains(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/socket"
    first, second = server_on(address), server_on(address)
    async with first, gradserve.aio.connect(address) as client:
        await client.server_info()
    async with second:
        assert await answers(address)


@pytest.mark.parametrize("name", ["with space", "100%", "a#b", "a?b", "ü", "a:b"])
async def test_any_name_of_a_socket(tmp_path: Path, name: str) -> None:
    address = f"unix:{tmp_path}/{name}"
    async with server_on(address) as server:
        assert server.addresses == (address,)
        assert await answers(address)
        assert sorted(os.listdir(tmp_path)) == sorted([name, f"{name}.shm"])
    assert os.listdir(tmp_path) == []


async def test_a_relative_path_is_announced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    async with server_on("unix:socket") as server:
        assert server.addresses == (f"unix:{tmp_path}/socket",)
        assert await answers("unix:socket")


# --- The address file


async def test_the_address_file_is_there_while_the_server_serves(tmp_path: Path) -> None:
    """Whoever finds the file can connect; nothing else is in the folder."""
    file = tmp_path / "addresses"
    async with server_on("127.0.0.1:0", "localhost:0", address_file=file) as server:
        assert file.read_text().splitlines() == list(server.addresses)
        assert [await answers(address) for address in server.addresses] == [True, True]
        assert os.listdir(tmp_path) == [file.name]
    assert os.listdir(tmp_path) == []


async def test_another_ones_address_file_outlives_the_server(tmp_path: Path) -> None:
    file = tmp_path / "addresses"
    first, second = server_on("127.0.0.1:0", address_file=file), server_on("127.0.0.1:0", address_file=file)
    async with first:
        await second.__aenter__()
    assert file.read_text().splitlines() == list(second.addresses)
    await second.__aexit__()
    assert not file.exists()


async def test_a_server_that_cannot_start_leaves_anothers_address_file(tmp_path: Path) -> None:
    file = tmp_path / "addresses"
    async with server_on("127.0.0.1:0", address_file=file) as server:
        assert "in use" in await failure_of(server_on(*server.addresses, address_file=file))
        assert file.read_text().splitlines() == list(server.addresses)


@pytest.mark.parametrize("kind", ["folder", "pipe", "link"])
async def test_what_is_no_ordinary_file_is_not_replaced_by_addresses(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "addresses"
    make: dict[str, Callable[[], None]] = {
        "folder": path.mkdir,
        "pipe": partial(os.mkfifo, path),
        "link": partial(path.symlink_to, "/dev/null"),
    }
    make[kind]()
    before = path.lstat()
    assert await failure_of(server_on("127.0.0.1:0", address_file=path)) == (
        f"cannot write the address file {path}: something other than an ordinary file is there"
    )
    assert path.lstat() == before
    assert os.listdir(tmp_path) == [path.name]


async def test_an_address_file_in_no_folder(tmp_path: Path) -> None:
    path = tmp_path / "nowhere" / "addresses"
    assert await failure_of(server_on("127.0.0.1:0", address_file=path)) == (
        f"cannot write the address file {path}: no such file or directory"
    )
