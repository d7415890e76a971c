"""Processes of tests end, whatever state they are in."""

import multiprocessing
import signal
import socket
import subprocess
import sys
from collections.abc import Callable

import psutil
import pytest

from tests.servers.polling import PATIENCE_SECONDS, eventually
from tests.servers.processes import end_process, ended, has_ended


def started() -> "subprocess.Popen[str]":
    """Returns a process that has said that it runs."""
    program = "import sys; print('running', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", program]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "running\n"
    return process


def leave_running(process: "subprocess.Popen[str]") -> None:
    pass


def suspend(process: "subprocess.Popen[str]") -> None:
    process.send_signal(signal.SIGSTOP)


def leave_text_for_it(process: "subprocess.Popen[str]") -> None:
    """Leaves what the pipe cannot take once the process is gone."""
    assert process.stdin is not None
    process.stdin.write("something")


def kill(process: "subprocess.Popen[str]") -> None:
    """Leaves a process that nobody has reaped."""
    process.kill()
    eventually(lambda: has_ended(psutil.Process(process.pid)))


def kill_and_reap(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.wait(PATIENCE_SECONDS)


STATES = [leave_running, suspend, leave_text_for_it, kill, kill_and_reap]


@pytest.mark.parametrize("bring_about", STATES, ids=lambda each: each.__name__)
def test_a_child_is_reaped_and_its_pipes_are_closed(bring_about: Callable[["subprocess.Popen[str]"], None]) -> None:
    with ended(started()) as process:
        bring_about(process)
    assert process.returncode == -signal.SIGKILL
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdin.closed
    assert process.stdout.closed
    assert not psutil.pid_exists(process.pid)
    end_process(process)


@pytest.mark.parametrize("bring_about", STATES, ids=lambda each: each.__name__)
def test_a_process_that_was_found(bring_about: Callable[["subprocess.Popen[str]"], None]) -> None:
    with ended(started()) as process:
        found = psutil.Process(process.pid)
        assert not has_ended(found)
        bring_about(process)
        end_process(found)
        assert has_ended(found)


def test_a_process_of_multiprocessing() -> None:
    process = multiprocessing.get_context("spawn").Process(target=signal.pause)
    process.start()
    pid = process.pid
    assert pid is not None
    end_process(process)
    assert not psutil.pid_exists(pid)


LISTENING = """
import socket, threading, time
memory = bytearray(b"x") * (50 << 20)
listening = socket.create_server(("127.0.0.1", 0))
for _ in range(50):
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
print(listening.getsockname()[1], flush=True)
time.sleep(600)
"""


def test_a_process_that_has_ended_listens_no_more() -> None:
    """Its first thread ends before the others, which keep its sockets open."""
    with ended(subprocess.Popen([sys.executable, "-c", LISTENING], stdout=subprocess.PIPE)) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        end_process(psutil.Process(process.pid))
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
