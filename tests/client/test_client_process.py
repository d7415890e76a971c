"""The client as part of a program: forks, closing, deadlines, errors, and two faces that are alike."""

import asyncio
import copy
import inspect
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

import gradserve
import gradserve.aio
from gradserve import errors
from gradserve.calls.time_limits import TimeLimits
from gradserve.transport.settings import ConnectionSettings
from gradserve.transport.status import ERRORS, error_from_status
from gradserve_server.config import ServerConfig
from gradserve_server.testing import LocalServer
from tests.servers.connecting import change_times, connect_with
from tests.servers.faulty_proxy import FaultyProxy
from tests.servers.polling import PATIENCE_SECONDS, eventually, eventually_async
from tests.servers.process import ServerProcess
from tests.servers.runtime import NOT_WARMED_UP

KINDS = ["conditional_accumulator", "sparse_conditional_accumulator", "gradient_accumulator"]

# --- Forks


FORKING_PROGRAM = """
import asyncio, os, sys, traceback
import gradserve, gradserve.aio

address = sys.argv[1]
client = gradserve.connect(address)
acc = client.conditional_accumulator("float32", ())
acc.apply_grad(1)

def in_child(act):
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            act()
            report = "no error"
        except BaseException as error:
            report = f"{type(error).__name__} {isinstance(error, RuntimeError)} {error}"
        os.write(writing, report.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        print(pipe.read())
    os.waitpid(pid, 0)

in_child(client.server_info)
in_child(lambda: acc.apply_grad(1))
in_child(lambda: acc.take_grad(1))
in_child(lambda: client.put([1.0]))
in_child(client.close)

async def main():
    async with gradserve.aio.connect(address) as client:
        await client.server_info()
        operation = client.server_info()

        def act():
            try:
                operation.send(None)
            except StopIteration:
                pass

        in_child(act)
        operation.close()

asyncio.run(main())
print("parent", acc.num_accumulated())
client.close()
"""


def test_a_forked_client_says_what_to_do(server_address: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKING_PROGRAM, server_address],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    *children, parent = done.stdout.splitlines()
    assert parent == "parent 1"
    assert len(children) == 6
    for report in children:
        assert report.startswith("ForkedClientError True this client was connected in process ")
        assert "connect after forking" in report


# --- Closing

CALLS: dict[str, Callable[[Any, dict[str, Any]], Any]] = {
    "server_info": lambda client, _: client.server_info(),
    "list_accumulators": lambda client, _: client.list_accumulators(),
    "delete_accumulator": lambda client, _: client.delete_accumulator("nobody's"),
    "delete_batch_norm_layer": lambda client, _: client.delete_batch_norm_layer("nobody's"),
    "list_tensors": lambda client, _: client.list_tensors(),
    "put": lambda client, _: client.put([1.0]),
    "put_all": lambda client, _: client.put_all([[1.0], 2]),
    "get": lambda client, made: client.get(made["handle"]),
    "get_all": lambda client, made: client.get_all([made["handle"]]),
    "delete": lambda client, made: client.delete(made["handle"]),
    "conditional_accumulator": lambda client, _: client.conditional_accumulator("float32"),
    "sparse_conditional_accumulator": lambda client, _: client.sparse_conditional_accumulator("float32"),
    "gradient_accumulator": lambda client, _: client.gradient_accumulator({"w": np.zeros(2)}),
    "batch_norm": lambda client, _: client.batch_norm(),
    "list_batch_norm_layers": lambda client, _: client.list_batch_norm_layers(),
    "run_updates": lambda client, _: client.run_updates(),
    "num_accumulated": lambda _, made: made["dense"].num_accumulated(),
    "set_global_step": lambda _, made: made["dense"].set_global_step(1),
    "info": lambda _, made: made["dense"].info(),
    "delete accumulator": lambda _, made: made["dense"].delete(),
    "dense apply_grad": lambda _, made: made["dense"].apply_grad(1),
    "dense take_grad": lambda _, made: made["dense"].take_grad(1, timeout=0.2),
    "dense read_average": lambda _, made: made["dense"].read_average(timeout=0.2),
    "large apply_grad": lambda _, made: made["large"].apply_grad(np.zeros(1 << 16)),
    "sparse apply_grad": lambda _, made: made["sparse"].apply_grad([0], [1.0]),
    "sparse apply_indexed_slices_grad": lambda _, made: made["sparse"].apply_indexed_slices_grad(
        gradserve.IndexedSlices(np.ones(1), np.zeros(1, np.int64))
    ),
    "sparse take_grad": lambda _, made: made["sparse"].take_indexed_slices_grad(1, timeout=0.2),
    "sparse read_average": lambda _, made: made["sparse"].read_average(timeout=0.2),
    "model apply_grad": lambda _, made: made["model"].apply_grad({"w": np.zeros(2)}),
    "model take_grad": lambda _, made: made["model"].take_grad(1, timeout=0.2),
    "model read_average": lambda _, made: made["model"].read_average(timeout=0.2),
    "model push_pull": lambda _, made: made["model"].push_pull({"w": np.zeros(2)}, 9, timeout=0.2),
    "layer call": lambda _, made: made["layer"](np.zeros((2, 3), np.float32)),
    "layer forward": lambda _, made: made["layer"].forward(np.zeros((2, 3), np.float32)),
    "layer backward": lambda _, made: made["layer"].backward(np.zeros((2, 3), np.float32), made["forward"]),
    "layer run_updates": lambda _, made: made["layer"].run_updates([made["forward"]]),
    "layer release": lambda _, made: made["layer"].release(made["forward"]),
    "layer get_variables": lambda _, made: made["layer"].get_variables(),
    "layer set_variables": lambda _, made: made["layer"].set_variables({"beta": np.zeros(3)}),
    "layer describe": lambda _, made: made["layer"].describe(),
    "layer delete": lambda _, made: made["layer"].delete(),
}


def make_things(client: gradserve.Client) -> dict[str, Any]:
    layer = client.batch_norm()
    return {
        "layer": layer,
        "forward": layer.forward(np.zeros((2, 3), np.float32)),
        "dense": client.conditional_accumulator("float32", ()),
        "large": client.conditional_accumulator("float64", (1 << 16,)),
        "sparse": client.sparse_conditional_accumulator("float32"),
        "model": client.gradient_accumulator({"w": np.zeros(2)}),
        "handle": client.put([1.0]),
    }


async def make_things_aio(client: gradserve.aio.Client) -> dict[str, Any]:
    layer = await client.batch_norm()
    return {
        "layer": layer,
        "forward": await layer.forward(np.zeros((2, 3), np.float32)),
        "dense": await client.conditional_accumulator("float32", ()),
        "large": await client.conditional_accumulator("float64", (1 << 16,)),
        "sparse": await client.sparse_conditional_accumulator("float32"),
        "model": await client.gradient_accumulator({"w": np.zeros(2)}),
        "handle": await client.put([1.0]),
    }


def failure_of(call: Callable[[], Any]) -> BaseException | None:
    try:
        call()
    except BaseException as error:
        return error
    return None


async def failure_of_aio(call: Any) -> BaseException | None:
    try:
        await call
    except BaseException as error:
        return error
    return None


def test_every_method_is_called_here() -> None:
    """The tables above name every method that makes a call."""
    called = {word for name in CALLS for word in name.split()}
    for face in (gradserve.Client, gradserve.BatchNormLayer, *(getattr(gradserve, name) for name in ACCUMULATORS)):
        assert public_methods(face) - {"close", "take_indexed_slices_grad"} <= called


def test_calls_after_close(server_address: str) -> None:
    client = gradserve.connect(server_address)
    made = make_things(client)
    client.close()
    client.close()
    for name, call in CALLS.items():
        failure = failure_of(partial(call, client, made))
        assert type(failure) is gradserve.CallCancelledError, name
        assert "closed" in str(failure)


async def test_calls_after_close_aio(server_address: str) -> None:
    client = gradserve.aio.connect(server_address)
    made = await make_things_aio(client)
    await client.close()
    await client.close()
    for name, call in CALLS.items():
        failure = await failure_of_aio(call(client, made))
        assert type(failure) is gradserve.CallCancelledError, name
        assert "closed" in str(failure)


def test_close_cancels_calls_under_way(client: gradserve.Client, server_address: str, name: str) -> None:
    acc = client.conditional_accumulator("float32", (), name)
    closing = gradserve.connect(server_address)
    take = closing.conditional_accumulator("float32", (), name).take_grad
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(take, 1, timeout=60)
        eventually(lambda: acc.info().num_waiting == 1)
        closing.close()
        with pytest.raises(gradserve.CallCancelledError) as error:
            waiting.result(PATIENCE_SECONDS)
    assert error.value.request_id is not None
    eventually(lambda: acc.info().num_waiting == 0)


async def test_close_cancels_calls_under_way_aio(server_address: str, name: str) -> None:
    async with gradserve.aio.connect(server_address) as client:
        acc = await client.conditional_accumulator("float32", (), name)
        closing = gradserve.aio.connect(server_address)
        other = await closing.conditional_accumulator("float32", (), name)

        async def num_waiting() -> int:
            return (await acc.info()).num_waiting

        waiting = asyncio.create_task(other.take_grad(1, timeout=60))
        await eventually_async(num_waiting)
        await closing.close()
        with pytest.raises(gradserve.CallCancelledError) as error:
            await asyncio.wait_for(waiting, PATIENCE_SECONDS)
        assert error.value.request_id is not None
        await eventually_async(num_waiting, lambda count: count == 0)


async def test_cancelling_a_task_cancels_its_call(server_address: str, name: str) -> None:
    async with gradserve.aio.connect(server_address) as client:
        acc = await client.conditional_accumulator("float32", (), name)

        async def num_waiting() -> int:
            return (await acc.info()).num_waiting

        waiting = asyncio.create_task(acc.take_grad(1, timeout=60))
        await eventually_async(num_waiting)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await eventually_async(num_waiting, lambda count: count == 0)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await acc.take_grad(1, timeout=60)
        await eventually_async(num_waiting, lambda count: count == 0)


@pytest.mark.parametrize("kind", KINDS)
def test_private_accumulators_end_with_their_client(client: gradserve.Client, name: str, kind: str) -> None:
    arguments: Any = {"w": np.zeros(2)} if kind == "gradient_accumulator" else "float32"
    with gradserve.connect(client.address) as other:
        private = getattr(other, kind)(arguments, name=name)
        shared = getattr(other, kind)(arguments, shared_name=name)
        assert private.name.startswith(f"{name}-")
        listed = {info.name for info in client.list_accumulators()}
        assert {private.name, shared.name} <= listed
    listed = {info.name for info in client.list_accumulators()}
    assert private.name not in listed
    assert shared.name in listed
    assert getattr(client, kind)(arguments, shared_name=name).delete()


@pytest.mark.parametrize("kind", KINDS)
async def test_private_accumulators_end_with_their_client_aio(client: gradserve.Client, name: str, kind: str) -> None:
    arguments: Any = {"w": np.zeros(2)} if kind == "gradient_accumulator" else "float32"
    async with gradserve.aio.connect(client.address) as other:
        private = await getattr(other, kind)(arguments, name=name)
        assert private.name in {info.name for info in client.list_accumulators()}
    assert private.name not in {info.name for info in client.list_accumulators()}


# --- No server, or one that says nothing


@pytest.fixture
def nobody() -> Iterator[str]:
    """An address at which nobody listens, and nobody will."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


NEVER_SECONDS = 1e6
"""The timeout of clients whose calls end without it: after five attempts, which take some seconds."""


def test_unreachable(nobody: str, server_address: str) -> None:
    """Objects made with a server, then called without."""
    with gradserve.connect(server_address) as helper:
        handle = make_things(helper)["handle"]
    client = gradserve.connect(nobody, timeout=NEVER_SECONDS)
    names = [name for name, call in CALLS.items() if not needs_what_was_made(call)]
    with ThreadPoolExecutor(len(names)) as threads:
        failures = dict(
            zip(
                names,
                threads.map(lambda each: failure_of(lambda: CALLS[each](client, {"handle": handle})), names),
                strict=True,
            )
        )
    client.close()
    assert {name: type(failure) for name, failure in failures.items()} == dict.fromkeys(
        names, gradserve.UnavailableError
    )


async def test_unreachable_aio(nobody: str, server_address: str) -> None:
    with gradserve.connect(server_address) as helper:
        handle = make_things(helper)["handle"]
    names = [name for name, call in CALLS.items() if not needs_what_was_made(call)]
    async with gradserve.aio.connect(nobody, timeout=NEVER_SECONDS) as client:
        failures = await asyncio.gather(*(failure_of_aio(CALLS[name](client, {"handle": handle})) for name in names))
    assert dict(zip(names, map(type, failures), strict=True)) == dict.fromkeys(names, gradserve.UnavailableError)


def needs_what_was_made(call: Callable[..., Any]) -> bool:
    return any(constant in ("dense", "large", "sparse", "model", "layer") for constant in call.__code__.co_consts)


def test_a_server_that_went_away() -> None:
    """Also calls of accumulators that were made before end with UnavailableError."""
    with LocalServer(ServerConfig(runtime=NOT_WARMED_UP)) as server:
        client = gradserve.connect(server.address, timeout=NEVER_SECONDS)
        made = make_things(client)
    with ThreadPoolExecutor(len(CALLS)) as threads:
        failures = dict(
            zip(CALLS, threads.map(lambda call: failure_of(lambda: call(client, made)), CALLS.values()), strict=True)
        )
    client.close()
    assert {name: type(failure) for name, failure in failures.items()} == dict.fromkeys(
        CALLS, gradserve.UnavailableError
    )


def test_a_server_that_came_back(tmp_path: Path) -> None:
    """A client needs no new connection for a new server at the address."""
    address = f"unix:{tmp_path}/socket"
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    with gradserve.connect(address) as client:
        with ServerProcess(tmp_path / "first", listen=(address,)):
            client.server_info()
        with pytest.raises(gradserve.UnavailableError):
            client.server_info()
        with ServerProcess(tmp_path / "second", listen=(address,)):
            assert eventually(lambda: failure_of(client.server_info) is None)


SHORT_TIMES = TimeLimits(0.5, reply=0.3)


def test_every_call_has_a_deadline(server_address: str) -> None:
    with FaultyProxy(server_address) as proxy:
        client = gradserve.connect(proxy.address, timeout=PATIENCE_SECONDS)
        made = make_things(client)
        silent = connect_with(proxy.address, ConnectionSettings(SHORT_TIMES))
        change_times(client, SHORT_TIMES)
        proxy.freeze()
        with ThreadPoolExecutor(len(CALLS)) as threads:
            failures = dict(
                zip(
                    CALLS, threads.map(lambda call: failure_of(lambda: call(silent, made)), CALLS.values()), strict=True
                )
            )
        assert {name: type(failure) for name, failure in failures.items()} == dict.fromkeys(
            CALLS, gradserve.DeadlineExceededError
        )
        client.close()
        silent.close()


async def test_every_call_has_a_deadline_aio(server_address: str) -> None:
    with FaultyProxy(server_address) as proxy:
        client = gradserve.aio.connect(proxy.address, timeout=PATIENCE_SECONDS)
        made = await make_things_aio(client)
        change_times(client, SHORT_TIMES)
        proxy.freeze()
        async with asyncio.timeout(PATIENCE_SECONDS):
            failures = await asyncio.gather(*(failure_of_aio(call(client, made)) for call in CALLS.values()))
            await client.close()
        assert dict(zip(CALLS, map(type, failures), strict=True)) == dict.fromkeys(
            CALLS, gradserve.DeadlineExceededError
        )


def test_a_server_that_accepts_and_says_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = gradserve.connect(f"127.0.0.1:{silent.getsockname()[1]}", timeout=0.3)
        for call in (client.server_info, lambda: client.put([1.0]), lambda: client.conditional_accumulator("float32")):
            started = time.monotonic()
            with pytest.raises(gradserve.DeadlineExceededError):
                call()
            assert time.monotonic() - started > 0.2
        client.close()


# --- Errors

ERROR_TYPES = sorted(
    (each for each in vars(errors).values() if inspect.isclass(each) and issubclass(each, gradserve.GradserveError)),
    key=lambda each: each.__name__,
)


@pytest.mark.parametrize("error_type", ERROR_TYPES, ids=lambda each: each.__name__)
def test_errors_can_be_read_pickled_and_copied(error_type: type[gradserve.GradserveError]) -> None:
    error = error_type("what was wrong", field="gradient[0]")
    error.request_id = 7
    assert str(error) == "what was wrong"
    assert repr(error) == f"{error_type.__name__}('what was wrong')"
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(other) is error_type
        assert (str(other), other.message, other.field, other.request_id) == (
            "what was wrong",
            "what was wrong",
            "gradient[0]",
            7,
        )


@pytest.mark.parametrize(
    ("error_type", "builtin"),
    [
        (gradserve.InvalidArgumentError, ValueError),
        (gradserve.NotFoundError, KeyError),
        (gradserve.OutOfRangeError, IndexError),
        (gradserve.DeadlineExceededError, TimeoutError),
        (gradserve.UnavailableError, ConnectionError),
        (gradserve.UnauthenticatedError, PermissionError),
        (gradserve.PermissionDeniedError, PermissionError),
        (gradserve.ForkedClientError, RuntimeError),
    ],
)
def test_errors_are_what_python_calls_them(error_type: type[Exception], builtin: type[Exception]) -> None:
    assert issubclass(error_type, builtin)
    assert issubclass(error_type, gradserve.GradserveError)


@pytest.mark.parametrize("code", [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK])
def test_every_status_is_an_error(code: grpc.StatusCode) -> None:
    assert code in ERRORS
    error = error_from_status(code, "", None)
    assert type(error) is ERRORS[code]
    assert str(error).endswith(code.name)


def test_malformed_details_are_passed_over() -> None:
    error = error_from_status(grpc.StatusCode.NOT_FOUND, "no", (("grpc-status-details-bin", b"\xff\xff"), ("a", "b")))
    assert (str(error), error.field) == ("no", None)


# --- Two faces

ACCUMULATORS = ["ConditionalAccumulator", "SparseConditionalAccumulator", "GradientAccumulator"]


def public_methods(face: type) -> set[str]:
    return {name for name, each in inspect.getmembers(face, callable) if not name.startswith("_")}


def is_awaited(method: Any) -> bool:
    return inspect.iscoroutinefunction(inspect.unwrap(method, stop=inspect.iscoroutinefunction))


@pytest.mark.parametrize("name", ["Client", "RawOps", *ACCUMULATORS])
def test_both_faces_are_alike(name: str) -> None:
    blocking, awaited = getattr(gradserve, name), getattr(gradserve.aio, name)
    assert public_methods(blocking) == public_methods(awaited)
    assert {each for each in dir(blocking) if not each.startswith("_")} == {
        each for each in dir(awaited) if not each.startswith("_")
    }
    for method in public_methods(blocking):
        ours, theirs = getattr(blocking, method), getattr(awaited, method)
        assert inspect.signature(ours).parameters == inspect.signature(theirs).parameters, method
        assert ours.__doc__ == theirs.__doc__, method
        assert ours.__doc__, method
        assert not is_awaited(ours), method
        assert is_awaited(theirs), method


def test_connect_is_alike() -> None:
    assert inspect.signature(gradserve.connect).parameters == inspect.signature(gradserve.aio.connect).parameters
    assert gradserve.connect.__doc__ == gradserve.aio.connect.__doc__


@pytest.mark.parametrize("module", [gradserve, gradserve.aio])
def test_all_is_complete_and_sorted(module: Any) -> None:
    exported = {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and not inspect.ismodule(value) and name != "annotations"
    }
    assert set(module.__all__) == exported
    constants = [name for name in module.__all__ if name.isupper()]
    classes = [name for name in module.__all__ if not name.isupper() and name[0].isupper()]
    functions = [name for name in module.__all__ if name[0].islower()]
    assert list(module.__all__) == sorted(constants) + sorted(classes) + sorted(functions)
    assert {error_type.__name__ for error_type in ERROR_TYPES} <= set(gradserve.__all__)


# --- Addresses and threads


async def test_unix_address(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/socket"
    with ServerProcess(tmp_path, listen=(address,)) as process:
        assert process.address == address
        with gradserve.connect(address) as client:
            acc = client.conditional_accumulator("float64", (1 << 16,), "w")
            acc.apply_grad(np.arange(1 << 16))
            async with gradserve.aio.connect(address) as other:
                same = await other.conditional_accumulator("float64", (1 << 16,), "w")
                assert np.array_equal(await same.take_grad(1), np.arange(1 << 16))


def test_a_client_is_safe_to_use_from_several_threads(client: gradserve.Client) -> None:
    acc = client.conditional_accumulator("float64", (), reduction_type="SUM")
    num_threads, num_each = 8, 50
    start = threading.Barrier(num_threads)

    def work(_: int) -> None:
        start.wait(PATIENCE_SECONDS)
        for _ in range(num_each):
            acc.apply_grad(1)

    with ThreadPoolExecutor(num_threads) as threads:
        list(threads.map(work, range(num_threads)))
    assert acc.take_grad(num_threads * num_each, timeout=PATIENCE_SECONDS) == num_threads * num_each
