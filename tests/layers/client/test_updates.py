"""Updates that wait: in which order they are run, and once."""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import gradserve
from gradserve_protocol.v1 import batch_norm_layer_messages_pb2 as messages_pb2
from gradserve_protocol.v1 import batch_norm_layer_pb2 as batch_norm_pb2
from tests.layers.client.fake_server import DY, FACES, FakeLayerServer, X, forward_ids, result_of, went_back


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
