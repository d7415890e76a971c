"""Threads that help each other with one piece of work."""

import gc
import itertools
import logging
import threading
import weakref
from collections.abc import Iterator
from functools import partial

import pytest

from gradserve_server.devices.host.kernels import ForkJoin
from tests.servers.polling import PATIENCE_SECONDS


@pytest.fixture
def parallel() -> Iterator[ForkJoin]:
    fork_join = ForkJoin(3)
    yield fork_join
    fork_join.close()


class Parts:
    """Work as `run` wants it: one part after the other until none is left, then wait for the others."""

    def __init__(self, num_parts: int) -> None:
        self.num_parts = num_parts
        self.threads: list[int] = []
        self._next = itertools.count()
        self._all = threading.Event()

    def __call__(self) -> None:
        while next(self._next) < self.num_parts:
            self.threads.append(threading.get_ident())
            if len(self.threads) == self.num_parts:
                self._all.set()
        assert self._all.wait(PATIENCE_SECONDS)


@pytest.mark.parametrize("num_parts", [1, 2, 3, 100])
@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_all_parts_are_done_once(num_threads: int, num_parts: int) -> None:
    parallel = ForkJoin(num_threads)
    parts = Parts(num_parts)
    parallel.run(parts, num_parts)
    assert len(parts.threads) == num_parts
    assert parallel.num_threads == num_threads
    parallel.close()


def test_the_caller_and_the_helpers_work_at_the_same_time(parallel: ForkJoin) -> None:
    together = threading.Barrier(3, timeout=PATIENCE_SECONDS)
    parallel.run(together.wait, 3)


def test_one_part_wakes_nobody(parallel: ForkJoin) -> None:
    threads: list[int] = []
    parallel.run(lambda: threads.append(threading.get_ident()), 1)
    parallel.close()
    assert threads == [threading.get_ident()]


def test_no_more_helpers_than_parts(parallel: ForkJoin) -> None:
    threads: list[int] = []
    together = threading.Barrier(2, timeout=PATIENCE_SECONDS)

    def work() -> None:
        threads.append(threading.get_ident())
        together.wait()

    parallel.run(work, 2)
    parallel.close()
    assert len(threads) == 2


def test_the_caller_gets_on_while_all_helpers_are_busy(parallel: ForkJoin) -> None:
    busy, release = threading.Barrier(4, timeout=PATIENCE_SECONDS), threading.Event()

    def occupy() -> None:
        busy.wait()
        release.wait(PATIENCE_SECONDS)

    other = threading.Thread(target=parallel.run, args=(occupy, 3))
    other.start()
    busy.wait()
    parts = Parts(50)
    parallel.run(parts, 50)
    assert parts.threads == [threading.get_ident()] * 50
    release.set()
    other.join()


def test_work_that_calls_again_does_not_deadlock(parallel: ForkJoin) -> None:
    inner = [Parts(7) for _ in range(5)]
    outer = itertools.count()

    def work() -> None:
        while (index := next(outer)) < 5:
            parallel.run(inner[index], 7)

    parallel.run(work, 5)
    parallel.close()
    assert [len(parts.threads) for parts in inner] == [7] * 5


def test_several_callers(parallel: ForkJoin) -> None:
    all_parts = [Parts(20) for _ in range(40)]

    def call(mine: list[Parts]) -> None:
        for parts in mine:
            parallel.run(parts, 20)

    callers = [threading.Thread(target=call, args=(all_parts[index::4],)) for index in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert [len(parts.threads) for parts in all_parts] == [20] * 40


def test_what_the_callers_thread_raises_reaches_it(parallel: ForkJoin) -> None:
    def work() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        parallel.run(work, 1)
    parts = Parts(5)
    parallel.run(parts, 5)
    assert len(parts.threads) == 5


def test_what_a_helper_raises_is_logged_and_the_helper_lives_on(caplog: pytest.LogCaptureFixture) -> None:
    parallel = ForkJoin(2)
    caller = threading.get_ident()
    together = threading.Barrier(2, timeout=PATIENCE_SECONDS)

    def work() -> None:
        together.wait()
        if threading.get_ident() != caller:
            raise ValueError("only there")

    with caplog.at_level(logging.ERROR):
        parallel.run(work, 2)
        parallel.run(threading.Barrier(2, timeout=PATIENCE_SECONDS).wait, 2)
        parallel.close()
    assert "only there" in caplog.text


def test_nothing_is_held_for_helpers_that_come_late() -> None:
    parallel = ForkJoin(2)
    busy, release = threading.Event(), threading.Event()
    caller = threading.get_ident()

    def occupy() -> None:
        if threading.get_ident() == caller:
            busy.wait(PATIENCE_SECONDS)
        else:
            busy.set()
            release.wait(PATIENCE_SECONDS)

    parallel.run(occupy, 2)
    parts = Parts(3)
    parallel.run(parts, 3)
    alive = weakref.ref(parts)
    del parts
    gc.collect()
    assert alive() is None
    release.set()
    parallel.close()


def test_close_ends_the_threads() -> None:
    before = set(threading.enumerate())
    parallel = ForkJoin(4)
    assert len(set(threading.enumerate()) - before) == 3
    parallel.close()
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("num_threads", [1, 2, 4])
@pytest.mark.parametrize("num_pieces", [0, 1, 2, 17])
def test_all_pieces_are_done_once(num_threads: int, num_pieces: int) -> None:
    parallel = ForkJoin(num_threads)
    done: list[int] = []
    parallel.run_all([partial(done.append, number) for number in range(num_pieces)])
    assert sorted(done) == list(range(num_pieces))
    parallel.close()


@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_piece_that_fails_does_not_keep_others_from_being_done(num_threads: int) -> None:
    def fail() -> None:
        raise OSError("no such thing")

    parallel = ForkJoin(num_threads)
    done: list[int] = []
    with pytest.raises(OSError, match="no such thing"):
        parallel.run_all([fail, *(partial(done.append, number) for number in range(9))])
    assert sorted(done) == list(range(9))
    parallel.close()
