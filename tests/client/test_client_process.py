"""A client and its process: forks, threads, and addresses that are files."""

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

import gradserve
import gradserve.aio
from gradserve.testing import ServerProcess
from tests.servers.polling import PATIENCE_SECONDS

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


def ended(program: str, server_address: str) -> "subprocess.CompletedProcess[str]":
    """Runs a program that forks to its end."""
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, server_address],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )


def test_a_forked_client_says_what_to_do(server_address: str) -> None:
    done = ended(FORKING_PROGRAM, server_address)
    assert done.returncode == 0, done.stderr
    *children, parent = done.stdout.splitlines()
    assert parent == "parent 1"
    assert len(children) == 6
    for report in children:
        assert report.startswith("ForkedClientError True this client was connected in process ")
        assert "connect after forking" in report


LEAVING_PROGRAM = """
import asyncio, os, sys
import gradserve, gradserve.aio

address = sys.argv[1]

def report(pid):
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

with gradserve.connect(address) as client:
    client.server_info()
    pid = os.fork()
    if pid == 0:
        sys.exit(7)
    report(pid)

async def main():
    async with gradserve.aio.connect(address) as client:
        await client.server_info()
        pid = os.fork()
        if pid == 0:
            try:
                raise ValueError("the fork's own error")
            except ValueError as error:
                try:
                    await client.__aexit__(ValueError, error, None)
                finally:
                    os._exit(5 if sys.exc_info()[1] is error else 1)
        report(pid)

asyncio.run(main())
"""


def test_a_fork_that_leaves_the_block_has_its_own_error(server_address: str) -> None:
    done = ended(LEAVING_PROGRAM, server_address)
    assert done.stdout.split() == ["7", "5"], done.stderr


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
