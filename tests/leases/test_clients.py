"""Clients that are killed, suspended, busy, forgotten or closed, and what they had for themselves alone."""

import asyncio
import gc
import math
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradserve
import gradserve.aio
from gradserve.calls.time_limits import TimeLimits
from gradserve.transport.settings import ConnectionSettings
from gradserve_server.app import Server
from gradserve_server.config import LeaseConfig, ListenConfig, ServerConfig
from gradserve_server.parts import Parts
from gradserve_server.rpc.listeners.grpc_listener import ClientKeepalive, GrpcListener
from gradserve_server.testing import LocalServer
from tests.leases.program import NUM_MADE
from tests.servers.clocks import SkippingClock
from tests.servers.connecting import connect_with
from tests.servers.faulty_proxy import FaultyProxy
from tests.servers.polling import eventually, eventually_async
from tests.servers.runtime import NOT_WARMED_UP

CLIENT_LEASE = 60.0
GRAD = np.ones(2, np.float32)
PATIENT = ClientKeepalive()


class AgingServer(LocalServer):
    """A server whose clock can be put forward."""

    def __init__(self, config: ServerConfig | None = None, keepalive: ClientKeepalive = PATIENT) -> None:
        self.clock = SkippingClock()
        listener = partial(GrpcListener, keepalive=keepalive)
        super().__init__(config, Parts(clock=self.clock, make_listener=listener))


@pytest.fixture
def server() -> Iterator[AgingServer]:
    """A server of this test alone, that notices soon when a connection is dead."""
    config = ServerConfig(runtime=NOT_WARMED_UP, leases=LeaseConfig(client_lease_seconds=CLIENT_LEASE))
    with AgingServer(config, ClientKeepalive(interval=0.3, timeout=0.3)) as local:
        yield local


def num_private(server: LocalServer) -> int:
    """Accumulators and layers: all those of these tests are private."""
    return server.inspect(lambda server: server.registry.count.used + server.layers.count.used)


def num_held(server: LocalServer) -> int:
    """Leases that clients hold."""

    def look(server: Server) -> int:
        clients = server.lifetimes.clients._clients.values()
        return sum(each.holder is not None and not each.holder.done() for each in clients)

    return server.inspect(look)


def pass_time(server: AgingServer, seconds: float) -> None:
    """Lets the server's leases grow older."""

    def skip(running: Server) -> None:
        server.clock.skipped += seconds
        running.lifetimes.expire(10_000)

    server.inspect(skip)


@contextmanager
def program(address: str, then: str) -> Iterator["subprocess.Popen[str]"]:
    """A program with a client that it never closes, once that has made one of everything."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.leases.program", address, then],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "made\n"
        yield process
    finally:
        process.kill()
        process.communicate()


# --- Clients that end without a word


@pytest.mark.parametrize("then", ["sleep", "wait"])
def test_what_a_killed_client_had_goes_when_its_lease_ends(server: AgingServer, then: str) -> None:
    with program(server.address, then) as process:
        eventually(lambda: num_held(server) == 1)
        pass_time(server, 100 * CLIENT_LEASE)
        assert num_private(server) == NUM_MADE
        process.send_signal(signal.SIGKILL)
        eventually(lambda: num_held(server) == 0)
        eventually(lambda: server.inspect(lambda server: server.registry.waiters.used) == 0)
        pass_time(server, CLIENT_LEASE - 20)
        assert num_private(server) == NUM_MADE
        pass_time(server, 20)
        assert num_private(server) == 0
    assert server.inspect(lambda server: len(server.lifetimes.clients)) == 0


def test_by_the_clock_of_the_wall() -> None:
    """As above, with nothing but time."""
    with (
        LocalServer(ServerConfig(runtime=NOT_WARMED_UP, leases=LeaseConfig(client_lease_seconds=1))) as server,
        gradserve.connect(server.address) as client,
        program(server.address, "sleep") as process,
    ):
        assert client.server_info().limits["client_lease"] == 1
        shared = client.conditional_accumulator("float32", shared_name="shared")
        process.send_signal(signal.SIGKILL)
        eventually(lambda: [each.name for each in client.list_accumulators()], lambda names: names == ["shared"])
        eventually(lambda: client.list_batch_norm_layers() == [])
        assert shared.delete()


def test_a_program_that_forgets_to_close_ends_all_the_same(server: AgingServer) -> None:
    with program(server.address, "end") as process:
        _, errors = process.communicate(timeout=20)
        assert (process.returncode, errors) == (0, "")
    eventually(lambda: num_held(server) == 0)
    pass_time(server, CLIENT_LEASE)
    assert num_private(server) == 0


FORGETFUL_AIO = """
import asyncio, sys
import gradserve.aio

async def main():
    client = gradserve.aio.connect(sys.argv[1])
    acc = await client.conditional_accumulator("float32")
    await acc.info()

asyncio.run(main())
"""


def test_an_asyncio_program_that_forgets_to_close_ends_all_the_same(server: AgingServer) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORGETFUL_AIO, server.address], capture_output=True, text=True, timeout=20, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    eventually(lambda: num_held(server) == 0)
    pass_time(server, CLIENT_LEASE)
    assert num_private(server) == 0


def test_a_client_that_was_suspended_for_too_long_is_told_why(server: AgingServer) -> None:
    with program(server.address, "ask") as process:
        eventually(lambda: num_held(server) == 1)
        process.send_signal(signal.SIGSTOP)
        eventually(lambda: num_held(server) == 0)
        pass_time(server, CLIENT_LEASE)
        assert num_private(server) == 0
        process.send_signal(signal.SIGCONT)
        _, errors = process.communicate("go on\n", timeout=30)
    assert process.returncode == 1
    assert "NotFoundError: no accumulator 'default/conditional_accumulator-" in errors
    assert "' any more: it was private to a client, whose lease of 60 s has ended: " in errors


def test_one_that_was_suspended_for_a_moment_goes_on(server: AgingServer) -> None:
    with program(server.address, "ask") as process:
        eventually(lambda: num_held(server) == 1)
        process.send_signal(signal.SIGSTOP)
        eventually(lambda: num_held(server) == 0)
        pass_time(server, CLIENT_LEASE - 20)
        process.send_signal(signal.SIGCONT)
        eventually(lambda: num_held(server) == 1)
        pass_time(server, 100 * CLIENT_LEASE)
        output, _ = process.communicate("go on\n", timeout=30)
    assert process.returncode == 0
    assert "is_private=True" in output


# --- Clients that live


async def test_a_blocked_event_loop_costs_nothing(server: AgingServer) -> None:
    """Everything here but the first lines happens while the loop of the client stands still."""
    async with gradserve.aio.connect(server.address) as client:
        acc = await client.conditional_accumulator("float32")
        while num_held(server) == 0:
            await asyncio.sleep(0.01)
        time.sleep(1.5)  # noqa: ASYNC251 - longer than the server waits for a sign of life
        assert num_held(server) == 1
        pass_time(server, 100 * CLIENT_LEASE)
        assert num_private(server) == 1
        assert (await acc.info()).is_private


def start(address: str) -> AgingServer:
    """Returns a server for an address that it is given."""
    local = AgingServer()
    local._config = local._config.model_copy(update={"listen": ListenConfig(listen=(address,))})
    return local


def test_a_server_that_is_started_anew_is_held_to_its_word_too(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/socket"
    with gradserve.connect(address) as client:
        with start(address) as first:
            old = client.conditional_accumulator("float32")
            eventually(lambda: num_held(first) == 1)
        with start(address) as second:
            with pytest.raises(gradserve.NotFoundError, match="no accumulator 'default/conditional_accumulator-"):
                old.info()
            new = client.conditional_accumulator("float32")
            eventually(lambda: num_held(second) == 1)
            pass_time(second, 100 * CLIENT_LEASE)
            assert new.info().is_private
            assert not old.delete()


def test_a_connection_that_breaks_is_held_anew(server: AgingServer) -> None:
    with FaultyProxy(server.address) as proxy:
        client = gradserve.connect(proxy.address, timeout=0.3)
        client.conditional_accumulator("float32")
        eventually(lambda: num_held(server) == 1)
    eventually(lambda: num_held(server) == 0)
    pass_time(server, CLIENT_LEASE)
    assert num_private(server) == 0
    client.close()


def background_threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "gradserve-background"]


@pytest.mark.parametrize("things", [0, 1, 100])
def test_a_thread_only_while_there_is_something(server: AgingServer, things: int) -> None:
    before = len(background_threads())
    with gradserve.connect(server.address) as client:
        client.conditional_accumulator("float32", shared_name="shared").delete()
        made = [client.conditional_accumulator("float32") for _ in range(things)]
        assert len(background_threads()) - before == min(things, 1)
        for each in made:
            each.delete()
        eventually(lambda: len(background_threads()) == before)
        assert len(client._calls._private) == 0
    assert len(background_threads()) == before


def test_threads_that_make_and_delete_at_the_same_time(server: AgingServer) -> None:
    with gradserve.connect(server.address) as client, ThreadPoolExecutor(8) as threads:

        def make_and_delete(number: int) -> None:
            acc = client.conditional_accumulator("float32", name=f"n{number}")
            acc.apply_grad(1.0)
            assert acc.delete()

        list(threads.map(make_and_delete, range(200)))
        kept = client.conditional_accumulator("float32")
        eventually(lambda: num_held(server) == 1)
        pass_time(server, 100 * CLIENT_LEASE)
        assert kept.info().is_private
        assert len(client._calls._private) == num_private(server) == 1
        assert kept.delete()
        eventually(lambda: background_threads() == [])
    assert server.inspect(lambda server: (len(server.lifetimes.clients), server.lifetimes.num_leases)) == (0, 0)


def test_a_forgotten_client_is_no_longer_held(server: AgingServer) -> None:
    """The program has neither the client nor anything that it made; an accumulator alone is enough."""
    acc = gradserve.connect(server.address).conditional_accumulator("float32")
    gc.collect()
    eventually(lambda: num_held(server) == 1)
    assert acc.info().is_private
    del acc
    gc.collect()
    eventually(lambda: num_held(server) == 0)
    eventually(lambda: background_threads() == [])


async def test_a_forgotten_asyncio_client_is_no_longer_held(server: AgingServer) -> None:
    acc = await gradserve.aio.connect(server.address).conditional_accumulator("float32")

    async def held() -> int:
        return num_held(server)

    gc.collect()
    await eventually_async(held)
    assert (await acc.info()).is_private
    del acc
    gc.collect()
    await eventually_async(held, lambda count: count == 0)


async def test_a_task_only_while_there_is_something(server: AgingServer) -> None:
    def tasks() -> list[str]:
        return [each.get_name() for each in asyncio.all_tasks() if each.get_name() == "gradserve-background"]

    async with gradserve.aio.connect(server.address) as client:
        acc = await client.conditional_accumulator("float32")
        layer = await client.batch_norm()
        assert len(tasks()) == 1
        await acc.delete()
        assert len(tasks()) == 1
        await layer.delete()
        while tasks():
            await asyncio.sleep(0.01)
        await client.conditional_accumulator("float32")
        assert len(tasks()) == 1
    assert tasks() == []
    assert num_private(server) == 0


# --- Deleting


def test_all_ways_to_delete_are_remembered(server: AgingServer) -> None:
    """A client that makes and deletes for ever does not grow."""
    with gradserve.connect(server.address) as client:
        accumulators = [client.conditional_accumulator("float32") for _ in range(3)]
        layers = [client.batch_norm() for _ in range(3)]
        assert len(client._calls._private) == 6
        assert accumulators[0].delete()
        client.raw_ops.DestroyResourceOp(resource=accumulators[1])
        assert client.delete_accumulator(accumulators[2].name)
        assert layers[0].delete()
        with layers[1]:
            pass
        assert client.delete_batch_norm_layer(layers[2].name)
        assert len(client._calls._private) == 0
        assert num_private(server) == 0


def test_deleting_by_name(server: AgingServer) -> None:
    with gradserve.connect(server.address) as client:
        acc = client.conditional_accumulator("float32", shared_name="net", container="run")
        layer = client.batch_norm(scope="net", container="run")
        assert not client.delete_accumulator("net")
        assert not client.delete_batch_norm_layer("net")
        assert client.delete_accumulator("net", container="run")
        assert client.delete_batch_norm_layer("net", container="run")
        assert not client.delete_accumulator("net", "run")
        assert not client.delete_batch_norm_layer("net", "run")
        for look in (acc.info, layer.describe):
            with pytest.raises(gradserve.NotFoundError):
                look()
        for delete in (client.delete_accumulator, client.delete_batch_norm_layer):
            with pytest.raises(gradserve.InvalidArgumentError, match="got an empty one"):
                delete("")
            with pytest.raises(gradserve.InvalidArgumentError, match="expected text"):
                delete(7)  # type: ignore[arg-type]


def test_a_waiting_take_is_told_that_its_client_was_closed(server: AgingServer) -> None:
    """By a call of another thread; that of the closed client itself is over with the client."""
    with gradserve.connect(server.address) as other, ThreadPoolExecutor(1) as threads:
        client = gradserve.connect(server.address)
        handle = client.raw_ops.ConditionalAccumulator(dtype="float32", shape=None)
        waiting = threads.submit(
            lambda: other.raw_ops.AccumulatorTakeGradient(handle=handle, num_required=1, dtype="float32")
        )
        eventually(lambda: server.inspect(lambda server: server.registry.waiters.used) == 1)
        client.close()
        with pytest.raises(gradserve.AbortedError, match="was deleted: it was private to a client that was closed"):
            waiting.result(10)
        with pytest.raises(gradserve.NotFoundError, match="any more: it was private to a client that was closed"):
            other.raw_ops.AccumulatorNumAccumulated(handle=handle)


def test_closing_does_not_wait_for_a_silent_server(server: AgingServer) -> None:
    settings = ConnectionSettings(TimeLimits(math.inf, closing=0.3))
    with FaultyProxy(server.address) as proxy:
        client = connect_with(proxy.address, settings)
        client.conditional_accumulator("float32")
        proxy.freeze()
        started = time.monotonic()
        client.close()
        assert time.monotonic() - started < 5


def test_a_server_that_shuts_down_does_not_wait_for_those_who_hold(server: AgingServer) -> None:
    with LocalServer(ServerConfig(runtime=NOT_WARMED_UP)) as local:
        client = gradserve.connect(local.address, timeout=1)
        client.conditional_accumulator("float32")
        eventually(lambda: num_held(local) == 1)
        started = time.monotonic()
    assert time.monotonic() - started < 10
    client.close()


# --- Idle leases


def test_what_nobody_uses(server: AgingServer) -> None:
    with gradserve.connect(server.address) as client, gradserve.connect(server.address) as other:
        make: list[Callable[[], Any]] = [
            lambda: client.conditional_accumulator("float32", shared_name="a", idle_lease=30),
            lambda: client.sparse_conditional_accumulator("float32", shared_name="b", idle_lease=30.0),
            lambda: client.gradient_accumulator({"w": GRAD}, shared_name="c", idle_lease=np.float32(30)),  # type: ignore[arg-type]  # a NumPy number
            lambda: client.batch_norm(scope="d", idle_lease=30),
        ]
        made = [each() for each in make]
        infos = [*(each.info() for each in made[:3]), made[3].describe()]
        assert [(info.is_private, info.idle_lease) for info in infos] == [(False, 30.0)] * 4
        assert other.list_accumulators()[0].idle_lease == other.list_batch_norm_layers()[0].idle_lease == 30.0
        same = other.conditional_accumulator("float32", shared_name="a", idle_lease=30)
        pass_time(server, 20)
        same.apply_grad(1.0)
        other.list_accumulators()
        pass_time(server, 20)
        assert [each.name for each in other.list_accumulators()] == ["a"]
        assert other.list_batch_norm_layers() == []
        with pytest.raises(
            gradserve.NotFoundError, match="'default/d' any more: nobody used it for 30 s, its idle_lease"
        ):
            made[3].get_variables()
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(made[0].take_grad, 2)
            eventually(lambda: same.info().num_waiting == 1)
            pass_time(server, 1000)
            same.apply_grad(3.0)
            assert waiting.result(10) == 2
        pass_time(server, 29)
        assert num_private(server) == 1
        pass_time(server, 2)
        assert num_private(server) == 0


def test_all_who_use_a_name_say_the_same(server: AgingServer) -> None:
    with gradserve.connect(server.address) as client:
        client.conditional_accumulator("float32", shared_name="a", idle_lease=30)
        client.batch_norm(scope="a", idle_lease=30)
        for create in (
            lambda: client.conditional_accumulator("float32", shared_name="a"),
            lambda: client.batch_norm(scope="a", reuse=True),
        ):
            with pytest.raises(gradserve.AlreadyExistsError, match="another lifetime: idle_lease is 30 s, not None"):
                create()


@pytest.mark.parametrize("bad", [0, -1, float("nan"), float("inf"), 1e12, "long", [1, 2]])
def test_an_idle_lease_that_cannot_be(server: AgingServer, bad: Any) -> None:
    with gradserve.connect(server.address) as client:
        for create in (client.conditional_accumulator, client.sparse_conditional_accumulator):
            with pytest.raises(gradserve.InvalidArgumentError) as error:
                create("float32", idle_lease=bad)
            assert error.value.field == "idle_lease"
        with pytest.raises(gradserve.InvalidArgumentError) as error:
            client.batch_norm(idle_lease=bad)
        assert error.value.field == "idle_lease"
        assert len(client._calls._private) == 0


# --- Forks

FORKING_PROGRAM = """
import os, sys
import gradserve

client = gradserve.connect(sys.argv[1])
acc = client.conditional_accumulator("float32", ())
acc.apply_grad(1)
sys.stdin.readline()
for _ in range(3):
    pid = os.fork()
    if pid == 0:
        with gradserve.connect(sys.argv[1]) as own:
            mine = own.conditional_accumulator("float32", ())
            mine.apply_grad(2)
            assert mine.take_grad(1) == 2
        sys.exit(0)
    assert os.waitpid(pid, 0)[1] == 0
print("forked", flush=True)
sys.stdin.readline()
assert acc.take_grad(1) == 1
"""


def test_a_fork_finds_no_call_under_way(server: AgingServer) -> None:
    """gRPC would say on standard error that it does not prepare the fork; and the lease is held again afterwards."""
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", FORKING_PROGRAM, server.address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        eventually(lambda: num_held(server) == 1)
        process.stdin.write("fork\n")
        process.stdin.flush()
        assert process.stdout.readline() == "forked\n"
        eventually(lambda: num_held(server) == 1)
        pass_time(server, 100 * CLIENT_LEASE)
        _, errors = process.communicate("go on\n", timeout=30)
        assert (process.returncode, errors) == (0, "")
    finally:
        process.kill()
        process.communicate()
