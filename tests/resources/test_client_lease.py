"""What a client remembers of what it has for itself alone, and when it holds its lease: without a server."""

import math
from collections.abc import Callable
from typing import Any

import pytest

import gradserve
from gradserve.calls.exchange import Background, Operation, Pause, TimeLimits, Unary
from gradserve.calls.identity import RequestIds
from gradserve.calls.lease import ClientLease
from gradserve_protocol.v1.lease_messages_pb2 import EndClientLeaseResponse, HoldClientLeaseResponse

CREATE = Unary("AccumulatorService", "CreateAccumulator", EndClientLeaseResponse())


def creation() -> Operation[str]:
    made: str = yield CREATE
    return made


def run(operation: Operation[Any], answer: Callable[[Any], Any]) -> Any:
    """Carries an operation out; `answer` answers its exchanges, or raises."""
    try:
        exchange = next(operation)
        while True:
            try:
                answered = answer(exchange)
            except gradserve.GradserveError as error:
                exchange = operation.throw(error)
            else:
                exchange = operation.send(answered)
    except StopIteration as stop:
        return stop.value


class World:
    """A client's private things, and the operations that it carries out in the background."""

    def __init__(self) -> None:
        self.lease = ClientLease("me", "calls of me", TimeLimits())
        self.background: list[Operation[None]] = []
        self.calls: list[str] = []

    def answer(self, exchange: Any) -> Any:
        if isinstance(exchange, Background):
            self.background.append(exchange.begin())
            return None
        self.calls.append(exchange.method)
        return "made"

    def create(self, name: str) -> Any:
        return run(self.lease.create(name, creation()), self.answer)


@pytest.fixture
def world() -> World:
    return World()


def test_the_first_creation_begins_to_hold_the_lease(world: World) -> None:
    assert (world.create("a"), world.create("b")) == ("made", "made")
    assert len(world.background) == 1
    hold = next(world.background[0])
    assert isinstance(hold, Unary)
    assert (hold.service, hold.method, hold.wait) == ("LeaseService", "HoldClientLease", math.inf)
    assert hold.request.client_id == "me"  # type: ignore[union-attr]


def test_the_names_do_not_tell_the_id() -> None:
    assert "secret" not in RequestIds("secret").private_name()
    assert RequestIds("secret").private_name() != RequestIds("other").private_name()


def test_when_all_is_deleted_it_stops_and_begins_anew_with_the_next(world: World) -> None:
    world.create("a")
    (holding,) = world.background
    next(holding)
    world.lease.deleted("a")
    with pytest.raises(StopIteration):
        holding.send(HoldClientLeaseResponse())
    world.create("b")
    assert len(world.background) == 2
    next(world.background[1])


def test_what_came_while_it_was_held_is_held_on(world: World) -> None:
    world.create("a")
    (holding,) = world.background
    next(holding)
    world.lease.deleted("a")
    world.create("b")
    assert isinstance(holding.send(HoldClientLeaseResponse()), Unary)
    assert len(world.background) == 1


def test_what_the_server_does_not_have_is_forgotten(world: World) -> None:
    """It is another server than the one it was made on."""
    world.create("a")
    (holding,) = world.background
    next(holding)
    with pytest.raises(StopIteration):
        holding.send(HoldClientLeaseResponse())
    assert len(world.lease) == 0
    run(world.lease.end(), world.answer)
    assert world.calls == ["CreateAccumulator"]


def test_a_creation_that_the_server_answers_before_it_says_that_it_has_nothing_is_held(world: World) -> None:
    """As with another run of the server: the call that holds the lease came there before the creation."""
    world.create("lost")
    (holding,) = world.background
    creating = world.lease.create("new", creation())
    assert next(creating) is CREATE
    next(holding)
    with pytest.raises(StopIteration):
        creating.send("made")
    assert isinstance(holding.send(HoldClientLeaseResponse()), Unary)
    assert len(world.lease) == 1
    with pytest.raises(StopIteration):
        holding.send(HoldClientLeaseResponse())
    assert len(world.lease) == 0


@pytest.mark.parametrize(
    "error",
    [
        gradserve.UnavailableError("no server"),
        gradserve.InternalError("a fault"),
        gradserve.ResourceExhaustedError("too many"),
        gradserve.DeadlineExceededError("a proxy has no patience"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_may_pass_is_tried_again_after_a_pause(world: World, error: gradserve.GradserveError) -> None:
    world.create("a")
    (holding,) = world.background
    for _ in range(3):
        assert isinstance(next(holding), Unary)
        assert isinstance(holding.throw(error), Pause)
    assert len(world.lease) == 1


def test_a_lease_that_is_not_renewed_any_more_is_told(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.create("a")
    (holding,) = world.background
    next(holding)
    with pytest.raises(StopIteration):
        holding.throw(gradserve.UnauthenticatedError("the server does not know this token"))
    assert "can no longer renew its lease" in caplog.text
    assert "does not know this token" in caplog.text


def test_after_a_fault_the_lease_is_held_again(world: World) -> None:
    world.create("a")
    (holding,) = world.background
    next(holding)
    with pytest.raises(RecursionError):
        holding.throw(RecursionError("planted"))
    again = world.lease.hold()
    assert isinstance(next(again), Unary)
    world.create("b")
    assert len(world.background) == 1, "it is held already"


def test_a_hold_whose_place_another_took_pauses(world: World) -> None:
    world.create("a")
    (holding,) = world.background
    next(holding)
    assert isinstance(holding.send(HoldClientLeaseResponse(replaced=True)), Pause)
    assert isinstance(next(holding), Unary)


@pytest.mark.parametrize("error", [gradserve.UnimplementedError("older"), gradserve.CallCancelledError("closed")])
def test_what_will_not_pass_ends_it(world: World, error: gradserve.GradserveError) -> None:
    world.create("a")
    (holding,) = world.background
    next(holding)
    with pytest.raises(StopIteration):
        holding.throw(error)
    world.create("b")
    assert len(world.background) == 2


def test_one_that_was_given_up_late_does_not_end_the_next(world: World) -> None:
    world.create("a")
    (first,) = world.background
    next(first)
    world.lease.deleted("a")
    with pytest.raises(StopIteration):
        first.send(HoldClientLeaseResponse())
    world.create("b")
    first.close()
    world.create("c")
    assert len(world.background) == 2


@pytest.mark.parametrize(
    ("error", "is_remembered"),
    [
        (gradserve.InvalidArgumentError("no"), False),
        (gradserve.ResourceExhaustedError("no"), False),
        (gradserve.UnavailableError("who knows"), True),
        (gradserve.DeadlineExceededError("who knows"), True),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_creation_that_fails(world: World, error: gradserve.GradserveError, is_remembered: bool) -> None:
    """What may have been made all the same is deleted when the client is closed."""

    def fail(exchange: Any) -> Any:
        raise error

    with pytest.raises(type(error)):
        run(world.lease.create("a", creation()), fail)
    assert len(world.lease) == int(is_remembered)
    run(world.lease.end(), world.answer)
    assert world.calls == ["EndClientLease"] * is_remembered


def test_closing_is_one_call_or_none(world: World) -> None:
    run(world.lease.end(), world.answer)
    assert world.calls == []
    for number in range(5):
        world.create(str(number))
    world.calls.clear()
    run(world.lease.end(), world.answer)
    run(world.lease.end(), world.answer)
    assert world.calls == ["EndClientLease"]
    assert len(world.lease) == 0


def test_a_worker_holds_its_lease_once(world: World) -> None:
    for _ in range(3):
        run(world.lease.be_worker(), world.answer)
    (holding,) = world.background
    hold = next(holding)
    assert isinstance(hold, Unary)
    assert hold.request.worker_client_id == "calls of me"  # type: ignore[union-attr]
    assert world.calls == []


def test_what_holds_private_resources_holds_on_for_a_worker(world: World) -> None:
    world.create("a")
    (holding,) = world.background
    assert not next(holding).request.worker_client_id  # type: ignore[union-attr]
    run(world.lease.be_worker(), world.answer)
    world.lease.deleted("a")
    again = holding.send(HoldClientLeaseResponse())
    assert isinstance(again, Unary)
    assert again.request.worker_client_id  # type: ignore[union-attr]
    assert len(world.background) == 1


def test_a_worker_ends_its_lease_when_it_is_closed(world: World) -> None:
    run(world.lease.be_worker(), world.answer)
    run(world.lease.end(), world.answer)
    run(world.lease.end(), world.answer)
    assert world.calls == ["EndClientLease"]
    (holding,) = world.background
    with pytest.raises(StopIteration):
        next(holding)


@pytest.mark.parametrize(("names", "seconds"), [([], 1.0), (["a"], 10.0)])
def test_a_worker_with_nothing_on_the_server_does_not_wait_for_it(
    world: World, names: list[str], seconds: float
) -> None:
    run(world.lease.be_worker(), world.answer)
    for name in names:
        world.create(name)
    ending = next(world.lease.end())
    assert isinstance(ending, Unary)
    assert ending.at_most == seconds


def test_a_worker_whose_lease_was_ended_begins_again_with_its_next_update(world: World) -> None:
    """Somebody else has ended it, or the server does not know leases of workers."""
    run(world.lease.be_worker(), world.answer)
    (holding,) = world.background
    next(holding)
    with pytest.raises(StopIteration):
        holding.send(HoldClientLeaseResponse())
    run(world.lease.be_worker(), world.answer)
    assert len(world.background) == 2


def test_what_was_deleted_is_forgotten(world: World) -> None:
    for number in range(100):
        world.create(str(number))
        world.lease.deleted(str(number))
    assert len(world.lease) == 0
