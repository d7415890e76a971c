"""What the client remembers of forwards, and what it warns of."""

import gc
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import gradserve
from gradserve.calls.batch_norm import forwards as batch_norm_forwards
from gradserve.v1 import batch_norm_layer_messages_pb2 as messages_pb2
from gradserve.v1 import batch_norm_layer_pb2 as batch_norm_pb2
from tests.layers.client.fake_server import DY, FACES, Context, FakeLayerServer, X, result_of

# --- Which forward


def forward_ids(server: FakeLayerServer) -> list[str]:
    return [request.forward_id for request in server.of("BatchNormForward")]


def released(server: FakeLayerServer) -> list[list[str]]:
    return [list(request.released_forward_ids) for request in server.of("BatchNormForward")]


def went_back(server: FakeLayerServer) -> list[str]:
    return [request.forward_id for request in server.of("BatchNormBackward")]


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


# --- Updates


def test_updates_run_in_their_order_and_once(server: FakeLayerServer, bn: Any) -> None:
    result_of(bn(X))
    result_of(bn(X, is_training=False))
    result_of(bn.forward(X))
    result_of(bn(X))
    ids = forward_ids(server)
    assert result_of(bn.run_updates()) == 3
    assert list(server.last("RunBatchNormUpdates").forward_ids) == [ids[0], ids[2], ids[3]]
    assert result_of(bn.run_updates()) == 0
    assert len(server.of("RunBatchNormUpdates")) == 1


def test_updates_of_forwards_that_are_named(server: FakeLayerServer, bn: Any) -> None:
    first, second, third = (result_of(bn.forward(X)) for _ in range(3))
    evaluated = result_of(bn.forward(X, is_training=False))
    assert result_of(bn.run_updates([third, evaluated, first])) == 2
    assert list(server.last("RunBatchNormUpdates").forward_ids) == [third.forward_id, first.forward_id]
    result_of(bn.run_updates())
    assert list(server.last("RunBatchNormUpdates").forward_ids) == [second.forward_id]
    for nothing in ([], [evaluated]):
        assert result_of(bn.run_updates(nothing)) == 0
    assert len(server.of("RunBatchNormUpdates")) == 2


def test_updates_are_run_again_when_they_failed(server: FakeLayerServer, bn: Any) -> None:
    result_of(bn(X))
    server.failures["RunBatchNormUpdates"] = [gradserve.UnavailableError("gone")]
    with pytest.raises(gradserve.UnavailableError):
        result_of(bn.run_updates())
    assert result_of(bn.run_updates()) == 1
    first, second = server.of("RunBatchNormUpdates")
    assert first == second


@pytest.mark.parametrize(
    ("updates", "run", "left"),
    [
        ("update_ops", (), 0),
        (["mine", "update_ops"], ("mine",), 0),
        ("mine", (), 1),
        ("update_ops", ("update_ops", "default"), 0),
        ("update_ops", ("update_ops", "elsewhere"), 1),
    ],
)
def test_updates_run_by_collection_do_not_wait(
    client: Any, server: FakeLayerServer, updates: Any, run: tuple[str, ...], left: int
) -> None:
    """However many steps a program makes, the layer object remembers none of them."""
    layers = [result_of(client.batch_norm(scope=name, updates_collections=updates)) for name in ("a", "b")]
    for layer in layers:
        result_of(layer(X))
    result_of(client.run_updates(*run))
    assert [result_of(layer.run_updates()) for layer in layers] == [left, left]


def test_updates_of_a_collection_that_failed_still_wait(client: Any, server: FakeLayerServer, bn: Any) -> None:
    result_of(bn(X))
    server.failures["RunBatchNormUpdates"] = [gradserve.UnavailableError("gone")]
    with pytest.raises(gradserve.UnavailableError):
        result_of(client.run_updates())
    assert result_of(bn.run_updates()) == 1


def test_a_forward_that_ends_after_the_updates_of_a_collection_waits(
    server: FakeLayerServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = FACES[0](server)
    bn = client.batch_norm(scope="bn")
    run = server._RunBatchNormUpdates

    def while_a_forward_ends(request: Any) -> Any:
        monkeypatch.undo()
        bn(X)
        return run(request)

    bn(X)
    monkeypatch.setattr(server, "_RunBatchNormUpdates", while_a_forward_ends)
    client.run_updates()
    assert bn.run_updates() == 1
    assert list(server.last("RunBatchNormUpdates").forward_ids) == forward_ids(server)[1:]


def test_a_client_does_not_keep_layer_objects(client: Any) -> None:
    bn = result_of(client.batch_norm(scope="bn"))
    seen = weakref.ref(bn._calls)
    del bn
    gc.collect()
    assert seen() is None
    result_of(client.run_updates())


def test_in_place_updates_do_not_wait(client: Any, server: FakeLayerServer, bn: Any) -> None:
    def forward(request: Any) -> Any:
        return messages_pb2.BatchNormForwardResponse(
            outputs=request.inputs,
            forward_id=request.forward_id,
            implementation=batch_norm_pb2.BATCH_NORM_IMPLEMENTATION_FUSED,
        )

    server._BatchNormForward = forward  # type: ignore[method-assign]
    result_of(bn(X))
    assert result_of(bn.run_updates()) == 0
    result_of(bn.backward(DY))


def test_going_back_leaves_the_updates(bn: Any) -> None:
    result_of(bn(X))
    result_of(bn.backward(DY))
    assert result_of(bn.run_updates()) == 1


def test_release(server: FakeLayerServer, bn: Any) -> None:
    first, second = (result_of(bn.forward(X)) for _ in range(2))
    evaluated = result_of(bn.forward(X, is_training=False))
    assert result_of(bn.release(second, evaluated)) == 1
    assert list(server.last("ReleaseBatchNormForwards").forward_ids) == [second.forward_id]
    result_of(bn.backward(DY))
    assert went_back(server) == [first.forward_id]
    result_of(bn.run_updates())
    assert list(server.last("RunBatchNormUpdates").forward_ids) == [first.forward_id]
    assert result_of(bn.release(evaluated)) == result_of(bn.release()) == 0
    assert len(server.of("ReleaseBatchNormForwards")) == 1


def test_several_threads_name_their_forwards(server: FakeLayerServer) -> None:
    bn = FACES[0](server).batch_norm(scope="bn")

    def work(_: int) -> None:
        for _ in range(20):
            forward = bn.forward(X)
            bn(X)
            bn.backward(DY, forward)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(8)))
    assert len(set(forward_ids(server))) == 320
    assert bn.run_updates() == 320
    bn(X)
    every_release = [each for request in server.of("BatchNormForward") for each in request.released_forward_ids]
    assert set(every_release) == {each for each in forward_ids(server)[:-1] if each not in went_back(server)}


# --- Very many


MANY = 5 * batch_norm_forwards.MAX_NAMED
"""More than one request names, and than an object remembers."""
REMEMBERED = batch_norm_forwards.MAX_REMEMBERED


def forward(number: int, *, replaceable: bool = False) -> batch_norm_forwards.UnusedForward:
    return batch_norm_forwards.UnusedForward(str(number), X.dtype, replaceable)


def numbers(names: Iterable[str]) -> list[int]:
    return [int(name) for name in names]


def test_the_newest_of_very_many_are_remembered() -> None:
    forwards = batch_norm_forwards.Forwards()
    newest = list(range(MANY - REMEMBERED, MANY))
    for number in range(MANY):
        forwards.add_unused(forward(number))
        forwards.add_pending(str(number))
    assert numbers(forwards.pending()) == numbers(forwards.outstanding()) == newest
    for number in range(MANY, 2 * MANY):
        forwards.add_lost(str(number))
    assert numbers(forwards.outstanding()) == newest + [MANY + number for number in newest]
    assert numbers(forwards.useless(replacing=True)) == [
        MANY + each for each in newest[: batch_norm_forwards.MAX_NAMED]
    ]


def test_a_request_names_so_many(server: FakeLayerServer, bn: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_norm_forwards, "MAX_NAMED", 3)
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
    monkeypatch.setattr(batch_norm_forwards, "MAX_NAMED", 3)
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
    monkeypatch.setattr(batch_norm_forwards, "MAX_NAMED", 3)
    server.failures["BatchNormForward"] = [KeyboardInterrupt() for _ in range(5)]
    for _ in range(5):
        with pytest.raises(KeyboardInterrupt):
            result_of(bn.forward(X, keep_for_backward=True))
    for _ in range(3):
        result_of(bn(X, is_training=False))
    lost = forward_ids(server)[:5]
    assert released(server)[-3:] == [lost[:3], lost[3:], []]


# --- Leaving


def test_leaving_a_layer_of_its_own_deletes_it(client: Any, server: FakeLayerServer) -> None:
    with Context(result_of(client.batch_norm())) as bn:
        result_of(bn(X))
    assert server.last("DeleteBatchNormLayer").layer.name == bn.name
    assert result_of(bn.run_updates()) == 0


def test_leaving_a_shared_layer_lets_go_of_forwards_but_not_of_updates(server: FakeLayerServer, bn: Any) -> None:
    with Context(bn) as entered:
        assert entered is bn
        updated = result_of(bn.forward(X))
        result_of(bn.run_updates())
        waiting = result_of(bn.forward(X))
        result_of(bn.forward(X))
        result_of(bn.backward(DY))
    request = server.last("ReleaseBatchNormForwards")
    assert list(request.forward_ids) == [updated.forward_id, waiting.forward_id]
    assert request.keep_updates
    assert not server.of("DeleteBatchNormLayer")
    assert result_of(bn.run_updates()) == 2


def test_only_leaving_keeps_updates(server: FakeLayerServer, bn: Any) -> None:
    result_of(bn.release(result_of(bn.forward(X))))
    assert not server.last("ReleaseBatchNormForwards").keep_updates
    assert result_of(bn.run_updates()) == 0


def test_leaving_sends_nothing_when_nothing_is_left(server: FakeLayerServer, bn: Any) -> None:
    with Context(bn):
        result_of(bn(X, is_training=False))
    assert not server.of("ReleaseBatchNormForwards")


@pytest.mark.parametrize("scope", [None, "bn"])
def test_leaving_does_not_hide_what_happened(client: Any, server: FakeLayerServer, scope: str | None) -> None:
    gone = gradserve.UnavailableError("gone")
    server.failures = {"DeleteBatchNormLayer": [gone], "ReleaseBatchNormForwards": [gone]}

    def work() -> None:
        with Context(result_of(client.batch_norm(scope=scope, updates_collections=None))) as bn:
            result_of(bn.forward(X))
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        work()


# --- Warnings

IGNORED = [{"argument": "param_regularizers[beta]", "reason": "the legacy implementation has no regularizers"}]


@pytest.fixture
def warned() -> Iterator[list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught


def test_arguments_without_effect_at_creation(
    client: Any, server: FakeLayerServer, warned: list[warnings.WarningMessage]
) -> None:
    server.replies["CreateBatchNormLayer"] = {"info": {"warnings": IGNORED}}
    server.replies["BatchNormForward"] = {"warnings": IGNORED}
    bn = result_of(client.batch_norm(scope="bn"))
    (only,) = warned
    assert only.category is gradserve.IgnoredArgumentWarning
    assert str(only.message) == (
        "param_regularizers[beta] of batch normalization layer 'bn' has no effect: the legacy implementation has no "
        "regularizers"
    )
    result_of(bn(X))
    assert len(warned) == 1
    result_of(client.batch_norm(scope="bn"))
    assert len(warned) == 2


@pytest.mark.parametrize("call", [lambda bn: bn(X), lambda bn: bn.forward(X)], ids=["a call", "a forward"])
def test_arguments_without_effect_in_a_forward(
    server: FakeLayerServer, bn: Any, call: Callable[[Any], Any], warned: list[warnings.WarningMessage]
) -> None:
    server.replies["BatchNormForward"] = {"warnings": [*IGNORED, {"argument": "adjustment", "reason": "so it is"}]}
    for _ in range(2):
        result_of(call(bn))
    assert [str(each.message).partition(" ")[0] for each in warned] == ["param_regularizers[beta]", "adjustment"]
    forward = result_of(bn.forward(X))
    assert [each.argument for each in forward.warnings] == ["param_regularizers[beta]", "adjustment"]


def test_a_warning_points_at_the_program(
    server: FakeLayerServer, bn: Any, warned: list[warnings.WarningMessage]
) -> None:
    server.replies["BatchNormForward"] = {"warnings": IGNORED}
    result_of(bn(X))
    assert "/gradserve/" not in warned[0].filename
    assert warned[0].filename.endswith("fake_transport.py")  # which runs the operations


def test_a_warning_that_is_an_error_loses_no_updates(server: FakeLayerServer, bn: Any) -> None:
    server.replies["BatchNormForward"] = {"warnings": IGNORED}
    with pytest.raises(gradserve.IgnoredArgumentWarning):
        result_of(bn(X))
    assert result_of(bn.run_updates()) == 1


def test_a_layer_that_warns_with_an_error_is_deleted_with_its_client(client: Any, server: FakeLayerServer) -> None:
    server.replies["CreateBatchNormLayer"] = {"info": {"warnings": IGNORED}}
    with pytest.raises(gradserve.IgnoredArgumentWarning):
        result_of(client.batch_norm())
    result_of(client.close())
    assert server.of("EndClientLease")
