"""A server in the process of its test, without a network: both clients, as over gRPC."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import gradserve
import gradserve.aio
from gradserve.testing import InProcessServer
from tests.security.serving import TOKENS, all_entries
from tests.servers.polling import PATIENCE_SECONDS, eventually

LARGE = np.arange(1 << 20, dtype=np.float64)


def blocking(address: str, use: Callable[[Any], Any], **options: Any) -> Any:
    """Runs a generator of calls with the blocking client."""
    with gradserve.connect(address, **options) as client:
        steps = use(client)
        try:
            answer = next(steps)
            while True:
                answer = steps.send(answer)
        except StopIteration as end:
            return end.value


def awaiting(address: str, use: Callable[[Any], Any], **options: Any) -> Any:
    """Runs the same with the asyncio client."""

    async def run() -> Any:
        async with gradserve.aio.connect(address, **options) as client:
            steps = use(client)
            try:
                waits_for = next(steps)
                while True:
                    try:
                        answer = await waits_for
                    except gradserve.GradserveError as error:
                        waits_for = steps.throw(error)
                    else:
                        waits_for = steps.send(answer)
            except StopIteration as end:
                return end.value

    return asyncio.run(run())


both_faces = pytest.mark.parametrize("run", [blocking, awaiting])


@pytest.fixture(scope="module")
def server() -> Iterator[InProcessServer]:
    with InProcessServer() as local:
        yield local


@pytest.fixture(autouse=True)
def _without_faults(server: InProcessServer) -> Iterator[None]:
    yield
    server.faults.clear()


@both_faces
def test_calls_of_every_kind(server: InProcessServer, name: str, run: Any) -> None:
    seen: list[int] = []

    def use(client: Any) -> Any:
        info = yield client.server_info()
        net = yield client.gradient_accumulator({"w": LARGE}, shared_name=name)
        pulled = yield net.push_pull({"w": LARGE}, 1, 0)
        handle = yield client.put(LARGE, progress=lambda done, _total: seen.append(done))
        stored = yield client.get(handle, release=True)
        left = yield client.list_tensors()
        forward = yield client.raw_ops.FusedBatchNormV3(
            x=np.ones((1, 2, 2, 1), np.float32), scale=[1], offset=[0], mean=[], variance=[]
        )
        return info.transport, pulled["w"], stored, left, forward.y

    transport, pulled, stored, left, y = run(server.address, use)
    assert transport == gradserve.TransportInfo("in_process", "")
    assert np.array_equal(pulled, LARGE)
    assert np.array_equal(stored, LARGE)
    assert seen[-1] == LARGE.nbytes
    assert left == []
    assert y.shape == (1, 2, 2, 1)


def test_nothing_listens() -> None:
    def listening() -> set[Any]:
        found = psutil.Process().net_connections(kind="all")
        return {each.laddr for each in found if each.status == psutil.CONN_LISTEN or isinstance(each.laddr, str)}

    before = listening() - {""}
    with InProcessServer() as server, gradserve.connect(server.address) as client:
        assert server.address.startswith("in-process:")
        assert client.server_info().sockets == ()
        assert listening() - {""} <= before


@both_faces
def test_errors_are_those_of_any_server(server: InProcessServer, name: str, run: Any) -> None:
    def use(client: Any) -> Any:
        net = yield client.gradient_accumulator({"w": np.zeros(3)}, shared_name=name)
        yield net.apply_grad({"w": np.zeros(4)}, 0)

    with pytest.raises(gradserve.InvalidArgumentError, match=r"expected \[3\], got \[4\]") as raised:
        run(server.address, use)
    assert raised.value.field == "gradient[0].dense.shape"


@both_faces
def test_a_lost_reply(server: InProcessServer, name: str, run: Any) -> None:
    lost = server.faults.drop_reply("PushPull")

    def use(client: Any) -> Any:
        net = yield client.gradient_accumulator({"w": np.zeros(3)}, shared_name=name)
        return (yield net.push_pull({"w": np.ones(3)}, 1, 0)).step

    assert run(server.address, use) == 1
    assert lost.happened == ["PushPull"]


@both_faces
def test_a_time_limit(server: InProcessServer, run: Any) -> None:
    server.faults.delay(PATIENCE_SECONDS, "GetServerInfo", times=None)

    def use(client: Any) -> Any:
        yield client.server_info()

    with pytest.raises(gradserve.DeadlineExceededError, match=r"no answer within 0\.1 s"):
        run(server.address, use, timeout=0.1)


@both_faces
def test_a_progress_function_that_fails_ends_the_upload(server: InProcessServer, run: Any) -> None:
    def fail(done: int, _total: int) -> None:
        if done:
            raise ZeroDivisionError("mine")

    def use(client: Any) -> Any:
        yield client.put(LARGE, progress=fail)

    with pytest.raises(ZeroDivisionError, match="mine"):
        run(server.address, use)
    with gradserve.connect(server.address) as client:
        eventually(client.list_tensors, lambda found: not found)


def test_a_cancelled_task_waits_no_more(server: InProcessServer, name: str) -> None:
    async def run() -> None:
        async with gradserve.aio.connect(server.address) as client:
            net = await client.gradient_accumulator({"w": np.zeros(3)}, shared_name=name)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await net.take_grad(1)

    asyncio.run(run())
    with gradserve.connect(server.address) as client:
        net = client.gradient_accumulator({"w": np.zeros(3)}, shared_name=name)
        eventually(net.info, lambda info: not info.num_waiting)


def in_a_thread(take: Callable[[], object]) -> tuple[threading.Thread, list[BaseException]]:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            take()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, errors


def test_closing_the_client_ends_its_calls(server: InProcessServer, name: str) -> None:
    client = gradserve.connect(server.address)
    net = client.gradient_accumulator({"w": np.zeros(3)}, shared_name=name)
    thread, errors = in_a_thread(lambda: net.take_grad(1))
    with gradserve.connect(server.address) as other:
        waiting = other.gradient_accumulator({"w": np.zeros(3)}, shared_name=name)
        eventually(waiting.info, lambda info: info.num_waiting == 1)
        client.close()
        thread.join()
        eventually(waiting.info, lambda info: not info.num_waiting)
    (error,) = errors
    assert isinstance(error, gradserve.CallCancelledError)
    assert str(error) == "the client is closed [GS_CANCELLED]"
    with pytest.raises(gradserve.CallCancelledError, match="the client is closed"):
        net.info()


def test_the_end_of_the_server_ends_calls(name: str) -> None:
    with InProcessServer() as server:
        client = gradserve.connect(server.address)
        net = client.gradient_accumulator({"w": np.zeros(3)}, shared_name=name)
        thread, errors = in_a_thread(lambda: net.take_grad(1))
        eventually(net.info, lambda info: info.num_waiting == 1)
    thread.join()
    assert [type(error) for error in errors] == [gradserve.UnavailableError]
    with pytest.raises(gradserve.UnavailableError, match=f"there is no server {server.address} in this process"):
        net.info()
    client.close()


def test_settings_and_access(tmp_path: Path) -> None:
    access = tmp_path / "access.toml"
    access.write_text(all_entries())
    with InProcessServer(access=str(access), max_message_bytes="4MiB") as server:
        with gradserve.connect(server.address) as nobody, pytest.raises(gradserve.UnauthenticatedError):
            nobody.list_tensors()
        with gradserve.connect(server.address, token=TOKENS["admin"]) as client:
            assert client.list_tensors() == []
            assert np.array_equal(client.get(client.put(LARGE)), LARGE), "in parts, each of which is short enough"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"transport": "bulk"}, "transport='bulk' is not possible: bulk: the server has no socket for it"),
        ({"transport": "grpc"}, ""),
    ],
    ids=["bulk", "grpc"],
)
def test_a_way_that_is_demanded(server: InProcessServer, options: Any, message: str) -> None:
    """In place of gRPC, the calls go to the server directly."""
    with gradserve.connect(server.address, **options) as client:
        if not message:
            assert client.server_info().version
        else:
            with pytest.raises(gradserve.UnavailableError, match=message):
                client.server_info()
