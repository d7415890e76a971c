"""Clients that are killed, suspended or not closed, and what they had for themselves alone."""

import signal
import subprocess
import sys

import pytest

import gradserve
import gradserve.aio
from gradserve_server.config import LeaseConfig, ServerConfig
from gradserve_testing import LocalServer
from tests.resources.clients.aging_server import CLIENT_LEASE, AgingServer, num_held, num_private, pass_time, program
from tests.resources.program import NUM_MADE
from tests.servers.polling import PATIENCE_SECONDS, eventually
from tests.servers.processes import ended
from tests.servers.runtime import NOT_WARMED_UP


@pytest.mark.parametrize("then", ["sleep", "wait"])
def test_what_a_killed_client_had_goes_when_its_lease_ends(server: AgingServer, then: str) -> None:
    with program(server.address, then) as process:
        eventually(lambda: num_held(server) == 1)
        pass_time(server, 100 * CLIENT_LEASE)
        assert num_private(server) == NUM_MADE
        process.send_signal(signal.SIGKILL)
        eventually(lambda: num_held(server) == 0)
        eventually(lambda: server.inspect(lambda server: server.registry.factory.waiters.used) == 0)
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
        _, errors = process.communicate(timeout=PATIENCE_SECONDS)
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
        [sys.executable, "-c", FORGETFUL_AIO, server.address],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    eventually(lambda: num_held(server) == 0)
    pass_time(server, CLIENT_LEASE)
    assert num_private(server) == 0


def test_a_client_that_was_suspended_for_too_long_is_told_why(watchful_server: AgingServer) -> None:
    with program(watchful_server.address, "ask") as process:
        eventually(lambda: num_held(watchful_server) == 1)
        process.send_signal(signal.SIGSTOP)
        eventually(lambda: num_held(watchful_server) == 0)
        pass_time(watchful_server, CLIENT_LEASE)
        assert num_private(watchful_server) == 0
        process.send_signal(signal.SIGCONT)
        _, errors = process.communicate("go on\n", timeout=PATIENCE_SECONDS)
    assert process.returncode == 1
    assert "NotFoundError: no accumulator 'default/conditional_accumulator-" in errors
    assert "' any more: it was private to a client, whose lease of 60 s has ended: " in errors


@pytest.mark.timing  # a connection whose client gets no processor for 1.3 s is lost once more
def test_one_that_was_suspended_for_a_moment_goes_on(watchful_server: AgingServer) -> None:
    with program(watchful_server.address, "ask") as process:
        eventually(lambda: num_held(watchful_server) == 1)
        process.send_signal(signal.SIGSTOP)
        eventually(lambda: num_held(watchful_server) == 0)
        pass_time(watchful_server, CLIENT_LEASE - 20)
        process.send_signal(signal.SIGCONT)
        eventually(lambda: num_held(watchful_server) == 1)
        pass_time(watchful_server, 100 * CLIENT_LEASE)
        output, _ = process.communicate("go on\n", timeout=PATIENCE_SECONDS)
    assert process.returncode == 0
    assert "is_private=True" in output


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
    started = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", FORKING_PROGRAM, server.address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with ended(started) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        eventually(lambda: num_held(server) == 1)
        process.stdin.write("fork\n")
        process.stdin.flush()
        assert process.stdout.readline() == "forked\n"
        eventually(lambda: num_held(server) == 1)
        pass_time(server, 100 * CLIENT_LEASE)
        _, errors = process.communicate("go on\n", timeout=PATIENCE_SECONDS)
        assert (process.returncode, errors) == (0, "")


PAUSING_PROGRAM = """
import os, threading
from gradserve.calls.exchange import Pause
from gradserve.transport.blocking.background import BackgroundThread
from gradserve.transport.settings import ConnectionSettings

has_gone_on = threading.Event()

def operation():
    yield Pause(3600)
    has_gone_on.set()

thread = BackgroundThread(operation, ConnectionSettings(), None, None)
pid = os.fork()
if pid == 0:
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
assert has_gone_on.wait(60)
"""


def test_a_fork_ends_no_operation_that_pauses() -> None:
    """An operation pauses after each call that a fork has ended, so the next of many forks may find it there."""
    command = [sys.executable, "-W", "ignore", "-c", PAUSING_PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
    assert (done.returncode, done.stderr) == (0, "")
