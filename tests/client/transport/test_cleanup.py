"""What is done after an object was forgotten."""

import gc
import logging
import os
import threading

import pytest

from gradserve.transport import network as cleanup
from gradserve.transport.network import Cleanup
from tests.servers.polling import PATIENCE_SECONDS, eventually


class Forgettable:
    pass


@pytest.fixture(autouse=True)
def _nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients of other tests have a thread, too."""
    monkeypatch.setattr(cleanup._Cleaner, "_present", None)


def threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "gradserve-cleanup"]


def test_a_thread_does_it_and_then_ends() -> None:
    before = len(threads())
    owners, done = [Forgettable(), Forgettable()], threading.Event()
    doer: list[threading.Thread] = []

    def work() -> None:
        doer.append(threading.current_thread())
        done.set()

    cleanups = [Cleanup(each, work) for each in owners]
    assert len(threads()) == before + 1
    del owners[0]
    assert done.wait(PATIENCE_SECONDS)
    assert doer != [threading.current_thread()]
    cleaner = cleanups[1]._cleaner
    eventually(lambda: cleaner._num_expected == 1)
    cleanups[1].call_off()
    cleanups[1].call_off()
    assert len(threads()) == before
    owners.clear()
    gc.collect()
    assert len(doer) == 1
    Cleanup(Forgettable(), work)  # gone at once
    eventually(lambda: len(doer) == 2)
    eventually(lambda: len(threads()) == before)


def test_a_failure_is_logged_and_the_rest_is_done(caplog: pytest.LogCaptureFixture) -> None:
    done = threading.Event()

    def fail() -> None:
        raise ValueError("no")

    with caplog.at_level(logging.ERROR):
        for work in (fail, done.set):
            owner = Forgettable()
            Cleanup(owner, work)
            del owner
        assert done.wait(PATIENCE_SECONDS)
    assert "could not be cleaned up" in caplog.text


def test_a_fork_leaves_it_alone() -> None:
    owner = Forgettable()
    reading, writing = os.pipe()
    kept = Cleanup(owner, lambda: os.write(writing, b"x"))
    child = os.fork()
    if not child:
        status = 1
        try:
            del owner
            ended, other = threading.Event(), Forgettable()
            Cleanup(other, ended.set)
            del other
            status = not ended.wait(PATIENCE_SECONDS)  # those of its own are cleaned up
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    os.set_blocking(reading, False)
    with pytest.raises(BlockingIOError):
        os.read(reading, 1)
    kept.call_off()
    os.close(reading)
    os.close(writing)
