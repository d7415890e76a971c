"""What the client remembers of forwards, and what it warns of."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest

import gradserve
from gradserve.calls.batch_norm import wire
from tests.layers.client.fake_server import DY, Context, FakeLayerServer, X, forward_ids, released, result_of, went_back


def test_forwards_have_names_of_their_own(server: FakeLayerServer, bn: Any) -> None:
    for _ in range(3):
        result_of(bn(X))
        result_of(bn.forward(X, False))
    assert len(set(forward_ids(server))) == 6
    assert all(name.startswith("me-") for name in forward_ids(server))


def test_backward_takes_the_newest_unused(server: FakeLayerServer, bn: Any) -> None:
    for _ in range(3):
        result_of(bn.forward(X))
    for _ in range(3):
        result_of(bn.backward(DY))
    assert went_back(server) == forward_ids(server)[::-1]
    with pytest.raises(gradserve.InvalidArgumentError, match="expected a forward of layer 'bn'"):
        result_of(bn.backward(DY))


def test_backward_takes_the_one_named(server: FakeLayerServer, bn: Any) -> None:
    first, second = (result_of(bn.forward(X)) for _ in range(2))
    result_of(bn.backward(DY, first))
    result_of(bn.backward(DY))
    assert went_back(server) == [first.forward_id, second.forward_id]


def test_a_retained_forward_is_used_again(server: FakeLayerServer, bn: Any) -> None:
    result_of(bn(X))
    result_of(bn.backward(DY, retain=True))
    result_of(bn.backward(DY))
    assert [request.retain_forward for request in server.of("BatchNormBackward")] == [True, False]
    with pytest.raises(gradserve.InvalidArgumentError):
        result_of(bn.backward(DY))


def test_inference_keeps_nothing_and_replaces_nothing(server: FakeLayerServer, bn: Any) -> None:
    with pytest.raises(gradserve.InvalidArgumentError) as error:
        result_of(bn.backward(DY))
    assert error.value.field == "forward_id"
    result_of(bn(X))
    evaluated = result_of(bn.forward(X, is_training=False))
    result_of(bn(X, is_training=False))
    with pytest.raises(gradserve.InvalidArgumentError, match="nothing was kept of this forward of layer 'bn'"):
        result_of(bn.backward(DY, evaluated))
    result_of(bn.backward(DY))
    assert went_back(server) == forward_ids(server)[:1]
    assert released(server) == [[], [], []]


def test_nothing_is_kept_when_told_so(bn: Any) -> None:
    result_of(bn.forward(X, keep_for_backward=False))
    with pytest.raises(gradserve.InvalidArgumentError):
        result_of(bn.backward(DY))


def test_a_call_replaces_the_one_before(server: FakeLayerServer, bn: Any) -> None:
    for _ in range(3):
        result_of(bn(X))
    first, second, third = forward_ids(server)
    assert released(server) == [[], [first], [second]]
    result_of(bn.backward(DY))
    assert went_back(server) == [third]
    result_of(bn(X))  # nothing is left of the last one
    assert released(server)[-1] == []


def test_forwards_are_not_replaced(server: FakeLayerServer, bn: Any) -> None:
    result_of(bn.forward(X))
    result_of(bn(X))
    result_of(bn.forward(X))
    result_of(bn(X))
    ids = forward_ids(server)
    assert released(server) == [[], [], [], [ids[1]]]
    for _ in range(3):
        result_of(bn.backward(DY))
    assert went_back(server) == [ids[3], ids[2], ids[0]]


def test_a_call_that_failed_leaves_the_one_before(server: FakeLayerServer, bn: Any) -> None:
    result_of(bn(X))
    server.failures["BatchNormForward"] = [gradserve.UnavailableError("gone")]
    with pytest.raises(gradserve.UnavailableError):
        result_of(bn(X))
    result_of(bn.backward(DY, retain=True))
    first, failed = forward_ids(server)
    assert went_back(server) == [first]
    result_of(bn(X))  # the server may have the one that failed; nobody else lets go of it
    assert set(released(server)[-1]) == {first, failed}
    result_of(bn(X))
    assert len(released(server)[-1]) == 1


def test_a_call_that_was_cancelled_is_let_go_of(server: FakeLayerServer, bn: Any) -> None:
    server.failures["BatchNormForward"] = [KeyboardInterrupt()]
    with pytest.raises(KeyboardInterrupt):
        result_of(bn(X))
    result_of(bn(X, is_training=False))
    assert released(server)[-1] == forward_ids(server)[:1]


CALLS: dict[str, Callable[[Any], Any]] = {
    "a call": lambda bn: bn(X),
    "a forward": lambda bn: bn.forward(X),
    "a named forward": lambda bn: bn.forward(X, forward_id="mine"),
}


OUTCOMES: list[tuple[BaseException, bool]] = [
    (gradserve.UnavailableError("gone"), True),
    (gradserve.DeadlineExceededError("too late"), True),
    (gradserve.InternalError("a fault"), True),
    (gradserve.CallCancelledError("closed"), True),
    (KeyboardInterrupt(), True),
    (gradserve.InvalidArgumentError("another rank"), False),
    (gradserve.NotFoundError("no such tensor"), False),
    (gradserve.ResourceExhaustedError("no memory"), False),
    (gradserve.AbortedError("deleted"), False),
]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(("failure", "may_be_there"), OUTCOMES, ids=[type(each).__name__ for each, _ in OUTCOMES])
def test_a_forward_that_nobody_can_use_is_let_go_of(
    server: FakeLayerServer, bn: Any, call: str, failure: BaseException, may_be_there: bool
) -> None:
    """One that has a name of the caller's may be repeated; one that was refused left nothing."""
    server.failures["BatchNormForward"] = [failure]
    with pytest.raises(type(failure)):
        result_of(CALLS[call](bn))
    result_of(bn(X, is_training=False))
    expected = forward_ids(server)[:1] if may_be_there and call != "a named forward" else []
    assert released(server)[-1] == expected


def test_a_forward_whose_outputs_did_not_arrive_is_let_go_of(server: FakeLayerServer, bn: Any) -> None:
    server.replies["BatchNormForward"] = {"outputs": {"handle": "lost on the way"}}
    with pytest.raises(KeyError):
        result_of(bn.forward(X))
    result_of(bn.forward(X, is_training=False, keep=True))
    assert released(server)[-1] == forward_ids(server)[:1]
    assert result_of(bn.run_updates()) == 1


@pytest.mark.parametrize(
    ("failure", "is_left"),
    [
        (gradserve.AbortedError("computed already", field="forward_id"), False),
        (gradserve.NotFoundError("its lease has ended", field="forward_id"), False),
        (gradserve.NotFoundError("no such tensor", field="outputs_gradient.handle"), True),
        (gradserve.NotFoundError("no such layer", field="layer.name"), True),
        (gradserve.InvalidArgumentError("another shape"), True),
        (gradserve.UnavailableError("gone"), True),
    ],
)
def test_what_is_left_after_a_failure(
    server: FakeLayerServer, bn: Any, failure: gradserve.GradserveError, is_left: bool
) -> None:
    older, _ = (result_of(bn.forward(X)) for _ in range(2))
    server.failures["BatchNormBackward"] = [failure]
    with pytest.raises(type(failure)):
        result_of(bn.backward(DY))
    result_of(bn.backward(DY))
    first, second = went_back(server)
    assert (first == second) is is_left
    assert (second == older.forward_id) is not is_left


MANY = 5 * wire.MAX_NAMED
"""More than one request names, and than an object remembers."""


REMEMBERED = wire.MAX_REMEMBERED


def forward(number: int, *, replaceable: bool = False) -> wire.UnusedForward:
    return wire.UnusedForward(str(number), X.dtype, replaceable)


def numbers(names: Iterable[str]) -> list[int]:
    return [int(name) for name in names]


def test_the_newest_of_very_many_are_remembered() -> None:
    forwards = wire.Forwards()
    newest = list(range(MANY - REMEMBERED, MANY))
    for number in range(MANY):
        forwards.add_unused(forward(number))
        forwards.add_pending(str(number))
    assert numbers(forwards.pending()) == numbers(forwards.outstanding()) == newest
    for number in range(MANY, 2 * MANY):
        forwards.add_lost(str(number))
    assert numbers(forwards.outstanding()) == newest + [MANY + number for number in newest]
    assert numbers(forwards.useless(replacing=True)) == [MANY + each for each in newest[: wire.MAX_NAMED]]


def test_a_request_names_so_many(server: FakeLayerServer, bn: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_NAMED", 3)
    forwards = [result_of(bn.forward(X)) for _ in range(7)]
    ids = [each.forward_id for each in forwards]
    parts = [ids[:3], ids[3:6], ids[6:]]

    def named(method: str) -> list[list[str]]:
        return [list(request.forward_ids) for request in server.of(method)]

    assert result_of(bn.run_updates()) == 7
    assert named("RunBatchNormUpdates") == parts
    with Context(bn):
        pass
    assert named("ReleaseBatchNormForwards") == parts
    assert result_of(bn.release(*forwards)) == 7
    assert named("ReleaseBatchNormForwards") == parts * 2


def test_updates_that_were_run_before_a_failure_do_not_wait(
    server: FakeLayerServer, bn: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "MAX_NAMED", 3)
    for _ in range(5):
        result_of(bn(X))
    run = server._RunBatchNormUpdates

    def gone(request: Any) -> Any:
        server.failures["RunBatchNormUpdates"] = [gradserve.UnavailableError("gone")]
        return run(request)

    monkeypatch.setattr(server, "_RunBatchNormUpdates", gone)
    with pytest.raises(gradserve.UnavailableError):
        result_of(bn.run_updates())
    monkeypatch.undo()
    assert result_of(bn.run_updates()) == 2


def test_lost_forwards_are_let_go_of_a_request_at_a_time(
    server: FakeLayerServer, bn: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "MAX_NAMED", 3)
    server.failures["BatchNormForward"] = [KeyboardInterrupt() for _ in range(5)]
    for _ in range(5):
        with pytest.raises(KeyboardInterrupt):
            result_of(bn.forward(X, keep_for_backward=True))
    for _ in range(3):
        result_of(bn(X, is_training=False))
    lost = forward_ids(server)[:5]
    assert released(server)[-3:] == [lost[:3], lost[3:], []]
