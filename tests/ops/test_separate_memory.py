"""Tensors on a server whose ops run on a device with memory of its own: each travels when it must, and only then."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

import gradserve
from gradserve_server.parts import Parts
from gradserve_testing import LocalServer
from tests.servers.polling import PATIENCE_SECONDS, eventually
from tests.servers.separate_device import SeparateDevice, separate_families

X = np.random.RandomState(0).standard_normal((4, 5, 6, 3)).astype(np.float32)
ONES, NONE = np.ones(3, np.float32), np.zeros(0, np.float32)
PARAMS: Any = {"scale": ONES, "offset": ONES, "mean": NONE, "variance": NONE}
PARAM_BYTES = 2 * ONES.nbytes


@pytest.fixture
def device() -> SeparateDevice:
    return SeparateDevice()


@pytest.fixture
def server(device: SeparateDevice) -> Iterator[LocalServer]:
    with LocalServer(parts=_parts(device)) as local:
        yield local


def _parts(device: SeparateDevice) -> Parts:
    return Parts(choose_device=lambda *_: device, make_families=lambda *_: separate_families(device))


@pytest.fixture
def client(server: LocalServer) -> Iterator[gradserve.Client]:
    with gradserve.connect(server.address, timeout=PATIENCE_SECONDS) as connected:
        yield connected


def test_it_says_what_ops_run_on(client: gradserve.Client) -> None:
    assert client.server_info().device == "separate:0"


def test_inline_goes_in_and_comes_out(client: gradserve.Client, device: SeparateDevice) -> None:
    result = client.raw_ops.FusedBatchNormV3(x=X, **PARAMS)
    assert device.copied_in == X.nbytes + PARAM_BYTES
    assert device.copied_out == sum(output.nbytes for output in result)
    assert abs(result.y.mean() - 1) < 1e-6


def test_a_stored_input_goes_in_once(client: gradserve.Client, device: SeparateDevice) -> None:
    x = client.put(X)
    for _ in range(3):
        client.raw_ops.FusedBatchNormV3(x=x, **PARAMS)
    assert device.copied_in == X.nbytes + 3 * PARAM_BYTES


def test_a_stored_input_can_be_read_still(client: gradserve.Client) -> None:
    x = client.put(X)
    client.raw_ops.FusedBatchNormV3(x=x, **PARAMS)
    assert np.array_equal(client.get(x), X)
    assert np.array_equal(client.get(x, release=True), X)
    assert client.list_tensors() == []


@pytest.mark.parametrize("transport", ["grpc", "bulk"])
def test_a_large_one_comes_out_as_a_stream(
    server: LocalServer, device: SeparateDevice, transport: Literal["grpc", "bulk"]
) -> None:
    large = np.random.default_rng(0).standard_normal((100, 4, 1000, 3)).astype(np.float32)
    with gradserve.connect(server.address, timeout=PATIENCE_SECONDS, transport=transport) as client:
        handles = [client.put(large), client.put(X), client.put(np.arange(7))]
        for x in handles[:2]:
            client.raw_ops.FusedBatchNormV3(x=x, **PARAMS, keep=True)
        device.copied_out = 0
        found = client.get_all(handles)
        assert device.copied_out == large.nbytes + X.nbytes
    for array, expected in zip(found, (large, X, np.arange(7)), strict=True):
        np.testing.assert_array_equal(array, expected)


@pytest.mark.parametrize("transport", ["grpc", "bulk"])
def test_a_device_that_fails_while_a_large_one_leaves(
    server: LocalServer, transport: Literal["grpc", "bulk"], monkeypatch: pytest.MonkeyPatch, device: SeparateDevice
) -> None:
    """What has left cannot be taken back: the client gets an error, and no array; nothing is lost."""
    read = device.read

    def fail_later(array: Any, offset: int, target: np.ndarray) -> None:
        if offset:
            raise RuntimeError("a copy fails")
        read(array, offset, target)

    monkeypatch.setattr(device, "read", fail_later)
    large = np.zeros((5, 1 << 20), np.float32)
    with gradserve.connect(server.address, timeout=PATIENCE_SECONDS, transport=transport) as client:
        handle = client.put(large.reshape(5, 1 << 10, 1 << 10, 1))
        client.raw_ops.FusedBatchNormV3(x=handle, **{**PARAMS, "scale": ONES[:1], "offset": ONES[:1]}, keep=True)
        with pytest.raises((gradserve.InternalError, gradserve.UnavailableError)):
            client.get(handle)
        monkeypatch.undo()
        assert not client.get(handle).any()


@pytest.mark.parametrize("name", ["auto", "separate:0"])
@pytest.mark.parametrize("transport", ["grpc", "bulk", "shared_memory"])
@pytest.mark.parametrize("shape", [X.shape, (5, 1 << 18, 1, 3)], ids=["small", "large"])
def test_a_tensor_can_be_put_on_the_device(
    tmp_path: Path, device: SeparateDevice, transport: Any, name: str, shape: tuple[int, ...]
) -> None:
    values = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    address = f"unix:{tmp_path / 'socket'}" if transport == "shared_memory" else "127.0.0.1:0"
    with (
        LocalServer(parts=_parts(device), address=address) as local,
        gradserve.connect(local.address, timeout=PATIENCE_SECONDS, transport=transport) as client,
    ):
        x, count = client.put_all([values, np.arange(5)], device=name)
        assert device.copied_in == values.nbytes + 5 * 8
        client.raw_ops.FusedBatchNormV3(x=x, **PARAMS, keep=True)
        assert device.copied_in == values.nbytes + 5 * 8 + PARAM_BYTES
        np.testing.assert_array_equal(client.get(x), values)
        np.testing.assert_array_equal(client.get(count), np.arange(5))
        assert client.server_info().usage["num_bytes"] >= values.nbytes
        client.delete(x, count)


def test_a_device_that_the_server_does_not_have(client: gradserve.Client) -> None:
    for put in (lambda: client.put(X, device="cuda:7"), lambda: client.put_all([X], device="cuda:7")):
        with pytest.raises(gradserve.InvalidArgumentError, match="expected cpu, separate:0 or auto, got 'cuda:7'"):
            put()
    assert client.list_tensors() == []


def test_large_inputs_go_to_the_device_by_themselves(server: LocalServer, device: SeparateDevice) -> None:
    """Over gRPC they are uploaded before the call, where it will need them."""
    large = np.zeros((5, 1 << 18, 1, 3), np.float32)
    with gradserve.connect(server.address, timeout=PATIENCE_SECONDS, transport="grpc") as client:
        client.raw_ops.FusedBatchNormV3(x=large, **PARAMS, keep=True)
        assert device.copied_in == large.nbytes + PARAM_BYTES


def test_kept_outputs_do_not_travel(client: gradserve.Client, device: SeparateDevice) -> None:
    x = client.put(X)
    forward = client.raw_ops.FusedBatchNormV3(x=x, **PARAMS, keep=True)
    assert device.copied_out == 0
    copied_in = device.copied_in
    gradient = client.raw_ops.FusedBatchNormGradV3(
        y_backprop=X, x=x, scale=ONES, reserve_space_1=forward.reserve_space_1, reserve_space_2=forward.reserve_space_2
    )
    assert device.copied_in - copied_in == X.nbytes + ONES.nbytes
    assert device.copied_out == sum(output.nbytes for output in gradient)
    assert np.array_equal(client.get(forward.y), client.raw_ops.FusedBatchNormV3(x=X, **PARAMS).y)


def test_a_kept_gradient_goes_into_an_accumulator(client: gradserve.Client, server: LocalServer) -> None:
    forward = client.raw_ops.FusedBatchNormV3(x=X, **PARAMS)
    fields: Any = {"x": X, "scale": ONES, "reserve_space_1": forward.reserve_space_1}
    fields["reserve_space_2"] = forward.reserve_space_2
    kept = client.raw_ops.FusedBatchNormGradV3(y_backprop=X, **fields, keep=True)
    inline = client.raw_ops.FusedBatchNormGradV3(y_backprop=X, **fields)
    acc = client.conditional_accumulator("float32", X.shape)
    acc.apply_grad(kept.x_backprop)
    assert np.array_equal(acc.take_grad(1), inline.x_backprop)
    model = client.gradient_accumulator({"x": X, "scale": ONES})
    gradient = {"x": kept.x_backprop, "scale": kept.scale_backprop}
    average = model.push_pull(gradient, num_required=1)
    assert np.array_equal(average["scale"], inline.scale_backprop)


def test_memory_is_given_back(client: gradserve.Client) -> None:
    outputs = client.raw_ops.FusedBatchNormV3(x=client.put(X), **PARAMS, keep=True)
    assert client.server_info().usage["num_bytes"] == 2 * X.nbytes + 4 * ONES.nbytes + 4
    client.delete(*outputs)
    assert client.server_info().usage["num_bytes"] == X.nbytes


def test_the_loss_of_a_device_is_told(
    client: gradserve.Client, device: SeparateDevice, caplog: pytest.LogCaptureFixture
) -> None:
    """`serve` then stops, with status 1, so that whatever runs it starts another process."""
    client.raw_ops.FusedBatchNormV3(x=X, **PARAMS)
    device.failure = "cudaErrorIllegalAddress"
    with pytest.raises(gradserve.InternalError, match="internal error; the server's log has the details"):
        client.raw_ops.FusedBatchNormV3(x=X, **PARAMS)
    told = "this process cannot use separate:0 any more: cudaErrorIllegalAddress"
    eventually(lambda: told in [each.getMessage() for each in caplog.records if each.levelname == "CRITICAL"])
