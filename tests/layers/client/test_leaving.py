"""Leaving the block of a layer, and warnings of arguments without effect."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import gradserve
from tests.layers.client.fake_server import DY, Context, FakeLayerServer, X, result_of


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
