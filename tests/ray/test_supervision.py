"""What keeps a server running, on servers in processes of their own and without Ray."""

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from gradserve_ray.directory import Directory, MemberRecord, MemberState
from gradserve_ray.supervision import Place, Supervisor
from gradserve_server.rpc.health.check import check_health
from tests.servers.polling import PATIENCE_SECONDS, eventually

HOST = "127.0.0.1"
FLAGS = ("--http-listen", "off", "--warm-up", "false")


@contextmanager
def supervised(directory: Directory, *flags: str) -> Iterator[Supervisor]:
    supervisor = Supervisor(directory, Place(0, HOST, flags))
    thread = threading.Thread(target=supervisor.run)
    thread.start()
    try:
        yield supervisor
    finally:
        supervisor.stop()
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive()


def running(directory: Directory, restarts: int = 0) -> MemberRecord:
    def look() -> MemberRecord:
        (heard,) = directory.members()
        return heard.record

    return eventually(look, lambda seen: seen.state is MemberState.RUNNING and seen.restarts == restarts)


def test_a_server_that_is_killed_is_back_at_its_address_and_ends_in_order() -> None:
    directory = Directory(1, None)
    assert directory.addresses() == [""]
    with supervised(directory, *FLAGS):
        first = running(directory)
        os.kill(first.pid, signal.SIGKILL)
        second = running(directory, restarts=1)
        assert second.address == first.address
        assert directory.addresses() == [second.address]
        assert check_health(second.address, PATIENCE_SECONDS) == "SERVING"
    (heard,) = directory.members()
    assert (heard.record.state, heard.record.pid) == (MemberState.STOPPED, 0)
    assert check_health(second.address, PATIENCE_SECONDS).startswith("UNAVAILABLE")


def test_a_directory_that_was_started_again_learns_the_size_before_a_server_starts() -> None:
    directory = Directory(2, None)
    directory.resize(3, 1)
    directory.resize(3, 1)
    assert (directory.size(), directory.epoch()) == (3, 1)
    again = Directory(2, None)
    assert again.begin(2, HOST).size == 2, "the cluster does not have it yet"
    assert again.addresses() == ["", ""]
    assert again.begin(0, HOST, *(1, 3)).size == 3
    assert (again.begin(2, HOST).epoch, again.size()) == (1, 3)
    again.begin(1, HOST, *(0, 2))
    again.resize(2, 1)
    assert again.size() == 3, "what is older changes nothing"


def test_a_server_waits_until_its_cluster_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradserve_ray.supervision._WAIT_SECONDS", 0.01)
    begun = threading.Event()

    class Watched(Directory):
        def begin(self, *given: Any) -> MemberRecord:
            begun.set()
            return super().begin(*given)

    directory = Watched(0, None)
    with supervised(directory, *FLAGS):
        assert begun.wait(PATIENCE_SECONDS)
        assert directory.members() == []
        directory.resize(1)
        assert running(directory).size == 1


def test_a_server_says_what_its_disk_knows_of_the_size() -> None:
    directory = Directory(2, None)
    place = Place(0, HOST, ("--max-bytes", "lots"), decided=lambda: (3, 1))
    supervisor = Supervisor(directory, place)
    thread = threading.Thread(target=supervisor.run)
    thread.start()
    assert eventually(directory.size, lambda size: size == 1) == 1
    supervisor.stop()
    thread.join(PATIENCE_SECONDS)
    assert directory.epoch() == 3


def test_a_port_that_was_taken_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server is of more use at another port than not at all."""
    monkeypatch.setattr("gradserve_ray.supervision._PORT_PATIENCE_SECONDS", 0.0)
    directory = Directory(1, None)
    with socket.socket() as other:
        other.bind((HOST, 0))
        other.listen()
        port = other.getsockname()[1]
        directory.report(MemberRecord(0, f"{HOST}:{port}"))
        with supervised(directory, *FLAGS):
            assert running(directory, restarts=1).address != f"{HOST}:{port}"


def test_a_server_that_cannot_start_is_tried_again_with_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last words say why."""
    monkeypatch.setattr("gradserve_ray.supervision._LONGEST_PAUSE_SECONDS", 0.01)
    directory = Directory(1, None)
    with supervised(directory, "--max-bytes", "lots"):
        (heard,) = eventually(directory.members, lambda seen: bool(seen[0].record.restarts and seen[0].record.problem))
    assert heard.record.problem.startswith("exit status 2; its last words:\n")
    assert "--max-bytes" in heard.record.problem
    assert directory.addresses() == [""]
