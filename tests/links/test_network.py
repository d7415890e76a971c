"""Links between network namespaces: they carry data, and leave nothing behind."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.harness.links.network import Link, LinkNotAvailableError, capped_link
from tests.links.serving import link_or_skip

_ECHO = """
import socket, sys
with socket.create_server((sys.argv[1], 5000)) as server:
    print("listening", flush=True)
    connection, _ = server.accept()
    with connection:
        while data := connection.recv(1 << 16):
            connection.sendall(data)
"""


def devices() -> str:
    return subprocess.run(["ip", "address", "show"], capture_output=True, text=True, check=True).stdout


def qdisc(link: Link, *enter: str) -> str:
    shown = subprocess.run([*enter, "tc", "qdisc", "show"], capture_output=True, text=True, check=True).stdout
    return next(line for line in shown.splitlines() if "gradserve" in line)


def test_a_link_carries_data_and_is_capped_both_ways() -> None:
    with link_or_skip(10) as link:
        assert "rate 10Mbit" in qdisc(link)
        assert "rate 10Mbit" in qdisc(link, *link.enter)
        command = [*link.enter, sys.executable, "-c", _ECHO, link.there]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as echo:
            assert echo.stdout is not None
            assert echo.stdout.readline() == b"listening\n"
            with socket.create_connection((link.there, 5000)) as connection:
                connection.sendall(b"hello")
                assert connection.recv(5, socket.MSG_WAITALL) == b"hello"


def test_nothing_is_left_of_a_link() -> None:
    with link_or_skip(10) as link:
        assert link.here in devices()
    assert link.here not in devices()


def test_nothing_is_left_of_a_link_when_what_uses_it_fails() -> None:
    with pytest.raises(ZeroDivisionError), link_or_skip(10) as link:
        raise ZeroDivisionError
    assert link.here not in devices()


def test_nothing_is_left_of_a_link_that_cannot_be_made() -> None:
    with link_or_skip(10):
        pass  # now it is known that links can be made
    before = devices()
    with pytest.raises(LinkNotAvailableError, match="tc qdisc add"), capped_link(0):
        pytest.fail("there is no such link")
    assert devices() == before


def test_a_machine_without_the_programs_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(LinkNotAvailableError, match="ip is not installed"), capped_link(10):
        pytest.fail("there is no such link")


def test_a_process_that_may_not_make_namespaces_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for program in ("ip", "tc", "nsenter", "unshare"):
        script = tmp_path / program
        script.write_text(f"#!/bin/sh\necho {program} failed: Operation not permitted >&2\nexit 1\n")
        script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LinkNotAvailableError, match="unshare failed: Operation not permitted"), capped_link(10):
        pytest.fail("there is no such link")
