"""The garbage collector of a server: what stays is looked at seldom, and what turns into garbage later is found."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from gradserve_server.runtime import event_loop as garbage
from gradserve_server.runtime.event_loop import GcTuner
from gradserve_server.runtime.process import importing


class Node:
    """An object that refers to itself, so that only a collection frees it."""

    def __init__(self) -> None:
        self.itself = self


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def _set_aside() -> Iterator[None]:
    """Sets aside what the test run has made, which these tests bring back to the collector."""
    yield
    gc.freeze()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pauses(clock: Clock) -> Iterator[GcTuner]:
    with GcTuner(clock) as pauses:
        yield pauses


@pytest.mark.usefixtures("pauses")
def test_what_survives_a_full_collection_is_put_aside() -> None:
    node = Node()
    assert any(each is node for each in gc.get_objects())
    gc.collect()
    assert not any(each is node for each in gc.get_objects())


@pytest.mark.usefixtures("pauses")
def test_garbage_that_is_new_is_found_as_before() -> None:
    node = weakref.ref(Node())
    gc.collect()
    assert node() is None


def test_garbage_that_was_put_aside_is_found_by_a_look_at_everything(
    pauses: GcTuner, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(garbage, "_MANY", 10**9)  # this process may have more objects than servers
    node = Node()
    gc.collect()
    left = weakref.ref(node)
    del node
    gc.collect()
    assert left() is not None
    clock.now = 600.0
    assert pauses.look_if_due()
    assert left() is None


@pytest.mark.exhaustive
def test_a_look_that_takes_long_is_seldom(pauses: GcTuner, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(garbage, "_MANY", 0)
    clock.now = 3599.0
    assert not pauses.look_if_due()
    clock.now = 3600.0
    assert pauses.look_if_due()
    assert not pauses.look_if_due()


def test_afterwards_the_collector_is_as_before() -> None:
    before = list(gc.callbacks)
    with GcTuner():
        assert gc.callbacks != before
    assert (gc.callbacks, gc.get_freeze_count()) == (before, 0)


@pytest.mark.exhaustive
def test_a_look_comes_early_where_much_more_was_put_aside(pauses: GcTuner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(garbage, "_GROWTH", 1.0)
    monkeypatch.setattr(garbage, "_FREE_GROWTH", 10_000)
    pauses.look_if_due()  # at what the test run has made meanwhile
    nodes = [Node() for _ in range(20_000)]
    gc.collect()
    left = weakref.ref(nodes[0])
    nodes.clear()
    assert left() is not None
    assert pauses.look_if_due()
    assert left() is None
    assert not pauses.look_if_due()


def test_what_a_server_loads_while_it_prepares_is_no_reason_to_look(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look takes a fifth of a second then, as the first workers come."""
    monkeypatch.setattr(garbage, "_GROWTH", 1.0)
    monkeypatch.setattr(garbage, "_FREE_GROWTH", 10_000)
    prepared: list[object] = []
    with GcTuner(clock, is_prepared=lambda: bool(prepared)) as pauses:
        loaded = [Node() for _ in range(20_000)]
        gc.collect()
        prepared += loaded
        assert not pauses.look_if_due()
        more = [Node() for _ in range(20_000)]
        gc.collect()
        assert pauses.look_if_due(), "what comes later counts"
    assert len(loaded) == len(more)


def test_calls_that_still_wait_are_no_reason_to_look(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look at ten thousand of them takes a second, in which no other call is answered."""
    monkeypatch.setattr(garbage, "_GROWTH", 1.0)
    monkeypatch.setattr(garbage, "_FREE_GROWTH", 10_000)
    num_waiting = 0
    with GcTuner(clock, lambda: num_waiting) as pauses:
        pauses.look_if_due()  # at what the test run has made meanwhile
        nodes = [Node() for _ in range(20_000)]
        num_waiting = 200
        gc.collect()
        assert not pauses.look_if_due()
        left, num_waiting = weakref.ref(nodes[0]), 0
        nodes.clear()
        assert pauses.look_if_due()
        assert left() is None


def test_frozen_objects_are_not_counted_in_vain(pauses: GcTuner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting a million of them takes 0.2 s."""
    pauses.look_if_due()
    gc.collect()
    with monkeypatch.context() as patched:
        patched.setattr(gc, "get_freeze_count", lambda: pytest.fail("all objects are visited"))
        assert not pauses.look_if_due()


def test_what_is_imported_is_set_aside() -> None:
    with importing():
        assert not gc.isenabled()
        node = Node()
    assert gc.isenabled()
    assert not any(each is node for each in gc.get_objects())


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with importing():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
