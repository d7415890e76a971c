"""SIGTERM and SIGINT end a server with status 0 and in time, whatever it is doing; a second one ends it at once."""

import asyncio
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest

import gradserve.aio
from gradserve.testing import ServerProcess
from tests.process.test_shutdown import HalfUpload, raw
from tests.servers.polling import PATIENCE_SECONDS, eventually, eventually_async
from tests.servers.processes import end_process, ended

BOTH = [signal.SIGTERM, signal.SIGINT]


def is_heard(process: int) -> bool:
    """Whether a process has got so far that it waits for SIGTERM."""
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith("SigBlk:"):
            return bool(int(line.split()[1], 16) & 1 << (signal.SIGTERM - 1))
    raise AssertionError("a process has a mask of signals")


def end(process: "subprocess.Popen[bytes]", number: signal.Signals) -> int:
    with ended(process):
        process.send_signal(number)
        return process.wait(PATIENCE_SECONDS)


# --- A server


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(("delay", "number"), list(zip((0.0, 0.05, 0.1, 0.2, 0.4, 0.8), BOTH * 3, strict=True)))
def test_a_server_that_starts(tmp_path: Path, number: signal.Signals, delay: float) -> None:
    """The delays fall into its imports, its start and its first work."""
    socket, log = tmp_path / "socket", tmp_path / "log"
    with log.open("wb") as output:
        server = subprocess.Popen(
            [sys.executable, "-m", "gradserve_server", "serve", "--listen", f"unix:{socket}", "--drain-seconds", "600"],
            stdout=output,
            stderr=output,
        )
    with ended(server):
        eventually(lambda: is_heard(server.pid))
        with suppress(subprocess.TimeoutExpired):
            server.wait(delay)
        assert end(server, number) == 0, log.read_text()
    assert "Traceback" not in log.read_text()
    assert not socket.exists()


def test_a_server_that_compiles_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "empty"))
    with ServerProcess(tmp_path, "--drain-seconds", "600", "--warm-up", "true") as server:
        maps = Path(f"/proc/{server.process.pid}/maps")
        eventually(lambda: "llvmlite" in maps.read_text())
        assert "kernels prepared" not in server.log
        assert end(server.process, signal.SIGINT) == 0
        assert "stopped" in server.log
        assert "kernels prepared" not in server.log
        assert "Traceback" not in server.log


async def test_a_server_whose_clients_never_finish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A take waits, an upload stands still and kernels are compiled: the drain time bounds it all."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "empty"))
    with ServerProcess(tmp_path, "--drain-seconds", "1", "--warm-up", "true") as server:
        async with raw(server.address) as stub, gradserve.aio.connect(server.address) as client:
            acc = await client.conditional_accumulator("float32", (), shared_name="w")
            take = asyncio.create_task(acc.take_grad(1, timeout=600))
            upload = HalfUpload(stub)
            await upload.begin()
            await eventually_async(stub.usage, lambda usage: usage.num_waiters > 0 < usage.num_handles)
            started = time.monotonic()
            assert await asyncio.to_thread(end, server.process, signal.SIGTERM) == 0
            assert time.monotonic() - started > 0.9
            with pytest.raises(gradserve.UnavailableError):
                await asyncio.wait_for(take, PATIENCE_SECONDS)
            assert "kernels prepared" not in server.log
            assert "Traceback" not in server.log


# --- The signals by themselves

PROGRAM = """
import ctypes, os, sys, threading, time
from gradserve_server.runtime.process import StopSignals

signals = StopSignals()
begun = threading.Event()

def begin():
    begun.set()
    print("begun", flush=True)

def deaf():
    "Does what no handler of Python's could interrupt."
    while True:
        ctypes.CDLL(None).sleep(600)

"""


def run_program(body: str, before: Sequence[str] = ()) -> "subprocess.Popen[bytes]":
    process = subprocess.Popen([*before, sys.executable, "-c", PROGRAM + body], stdout=subprocess.PIPE)
    with ExitStack() as failing:
        failing.callback(end_process, process)
        assert read(process) == "ready"
        failing.pop_all()
    return process


def read(process: "subprocess.Popen[bytes]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().decode().strip()


READY = "print('ready', flush=True)\n"


@pytest.mark.sampled
@pytest.mark.parametrize("number", BOTH)
@pytest.mark.parametrize(
    ("body", "status"),
    [
        (READY + "deaf()", 0),
        ("signals.drain_with(lambda: os._exit(3), 600)\n" + READY + "deaf()", 3),
        ("signals.drain_with(begin, 0.1)\n" + READY + "deaf()", 0),
        ("signals.drain_with(begin, 600)\n" + READY + "begun.wait()\nsys.exit(4)", 4),
    ],
    ids=["nothing to drain", "drained", "not drained in time", "drained by the main thread"],
)
def test_the_first_signal(number: signal.Signals, body: str, status: int) -> None:
    assert end(run_program(body), number) == status


@pytest.mark.sampled
@pytest.mark.parametrize("second", BOTH)
@pytest.mark.parametrize("first", BOTH)
def test_the_second_signal_ends_the_process_as_if_it_had_no_handler(
    first: signal.Signals, second: signal.Signals
) -> None:
    with ended(run_program("signals.drain_with(begin, 600)\n" + READY + "deaf()")) as process:
        process.send_signal(first)
        assert read(process) == "begun"
        assert end(process, second) == -second


def test_the_second_signal_ends_the_first_process_of_a_container() -> None:
    """The kernel keeps such a process from signals that it has no handler for."""
    unshare = ["unshare", "--pid", "--fork", "--kill-child"]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*unshare, "true"], check=False, capture_output=True).returncode
    ):
        pytest.skip("needs to be allowed to make namespaces")
    program = "signals.drain_with(begin, 600)\n" + READY + "begun.wait()\ndeaf()"
    with ended(run_program(program, unshare)) as process:  # the inner one ends with it
        (inner,) = psutil.Process(process.pid).children()
        inner.send_signal(signal.SIGTERM)
        assert read(process) == "begun"
        inner.send_signal(signal.SIGTERM)
        # `unshare` exits with the number, or ends by the signal itself.
        assert process.wait(PATIENCE_SECONDS) in (128 + signal.SIGTERM, -signal.SIGTERM)


def test_a_signal_that_comes_twice_at_once_is_one() -> None:
    """As `timeout` sends it: to the process, and to its group."""
    process = run_program("signals.drain_with(begin, 600)\n" + READY + "begun.wait()\nos._exit(0)")
    process.send_signal(signal.SIGTERM)
    assert end(process, signal.SIGTERM) == 0


def test_the_process_ends_before_the_time_if_it_is_done() -> None:
    process = run_program("signals.drain_with(begin, 600)\n" + READY + "begun.wait()")
    assert end(process, signal.SIGTERM) == 0


THREADS: list[tuple[str, str]] = [
    ("threading.Thread(target=deaf).start()", "a thread that compiles"),
    ("threading.Thread(target=deaf, daemon=True).start()", "only daemons"),
    ("", "no thread"),
]


@pytest.mark.parametrize("body", [body for body, _ in THREADS], ids=[name for _, name in THREADS])
def test_threads_do_not_hold_up_the_end(body: str) -> None:
    program = f"{PROGRAM}\nfrom gradserve_server.runtime.process import end_process\n{body}\nend_process()"
    done = subprocess.run([sys.executable, "-c", program], timeout=PATIENCE_SECONDS, check=False)
    assert done.returncode == 0
