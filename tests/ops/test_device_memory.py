"""Ops on a server whose device has little memory of its own."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from pydantic import ByteSize

import gradserve
from gradserve_server.commands.cli import cli
from gradserve_server.commands.wording import figure
from gradserve_server.config import LimitsConfig, ServerConfig
from gradserve_server.devices.compute import DEVICE_THREADS
from gradserve_server.parts import Parts
from gradserve_testing import LocalServer
from tests.servers.polling import PATIENCE_SECONDS, eventually
from tests.servers.separate_device import SeparateDevice, separate_families

X = np.random.RandomState(0).standard_normal((32, 16, 40, 3)).astype(np.float32)
ONES, NONE = np.ones(3, np.float32), np.zeros(0, np.float32)
PARAMS: Any = {"scale": ONES, "offset": ONES, "mean": NONE, "variance": NONE}
SMALL_BYTES = 4 * ONES.nbytes + 4
"""The outputs besides y."""
LIMIT = 4 * X.nbytes
BATCH_NORM: Any = {"x": X, **PARAMS}


@pytest.fixture
def device() -> SeparateDevice:
    return SeparateDevice(LIMIT)


@pytest.fixture
def server(device: SeparateDevice) -> Iterator[LocalServer]:
    parts = Parts(choose_device=lambda *_: device, make_families=lambda *_: separate_families(device))
    with LocalServer(parts=parts) as local:
        yield local


@pytest.fixture
def client(server: LocalServer) -> Iterator[gradserve.Client]:
    with gradserve.connect(server.address, timeout=PATIENCE_SECONDS) as connected:
        yield connected


def used(client: gradserve.Client) -> tuple[float, float, float]:
    """Returns the bytes on the host, and on the device stored and otherwise."""
    info = client.server_info()
    device = info.device_usage
    rest = ("computing_bytes", "accumulator_bytes", "layer_bytes")
    return info.usage["num_bytes"], device["stored_bytes"], sum(device[name] for name in rest)


def test_what_is_kept_counts_where_it_is(client: gradserve.Client) -> None:
    x = client.put(X)
    assert used(client) == (X.nbytes, 0, 0)
    outputs = client.raw_ops.FusedBatchNormV3(x=x, **PARAMS, keep=True)
    assert used(client) == (0, 2 * X.nbytes + SMALL_BYTES, 0), "the input has moved"
    client.raw_ops.FusedBatchNormV3(x=x, **PARAMS)
    assert used(client) == (0, 2 * X.nbytes + SMALL_BYTES, 0)
    client.delete(x, *outputs)
    assert used(client) == (0, 0, 0)


def test_an_upload_to_the_device_counts_there(client: gradserve.Client) -> None:
    handles = [client.put(X, device="auto") for _ in range(4)]
    assert used(client) == (0, LIMIT, 0)
    client.put(X[:1], device="auto")
    assert used(client) == (X.nbytes, LIMIT - X.nbytes + X[:1].nbytes, 0), "the oldest made room"
    assert all(np.array_equal(client.get(handle), X) for handle in handles)


def test_outputs_that_nobody_used_lately_move_to_the_host(client: gradserve.Client, device: SeparateDevice) -> None:
    inline = client.raw_ops.FusedBatchNormV3(**BATCH_NORM)
    kept = [client.raw_ops.FusedBatchNormV3(**BATCH_NORM, keep=True) for _ in range(6)]
    on_host, on_device, rest = used(client)
    assert on_host + on_device == 6 * (X.nbytes + SMALL_BYTES)
    assert 0 < on_device <= LIMIT
    assert rest == 0
    figures = client.server_info().device_usage
    assert figures["evicted_bytes"] == on_host
    assert figures["num_evicted"] > 0
    assert figures["max_bytes"] == LIMIT
    for outputs in kept:
        assert np.array_equal(client.get(outputs.y), inline.y)
    before = device.copied_in
    client.raw_ops.FusedBatchNormV3(x=kept[0].y, **PARAMS)
    assert device.copied_in - before == X.nbytes + 2 * ONES.nbytes, "it comes back when an op needs it"
    for outputs in kept:
        client.delete(*outputs)
    assert used(client) == (0, 0, 0)


def test_what_never_fits_is_refused_with_the_numbers(client: gradserve.Client) -> None:
    kept = client.raw_ops.FusedBatchNormV3(**BATCH_NORM, keep=True)
    before = used(client)
    large: Any = {"x": np.tile(X, (3, 1, 1, 1)), **PARAMS}
    with pytest.raises(
        gradserve.ResourceExhaustedError,
        match=rf"device's memory \(--max-device-bytes\): \d+ asked for, {before[1]:.0f} in use, {LIMIT} allowed",
    ):
        client.raw_ops.FusedBatchNormV3(**large)
    assert used(client) == before, "nothing moved in vain"
    assert client.get(kept.y).shape == X.shape


@pytest.mark.parametrize(("num_shortages", "num_freed", "num_moved"), [(1, 1, 0), (2, 1, 1), (3, 2, 1)])
def test_an_op_without_memory_is_computed_again(
    client: gradserve.Client, device: SeparateDevice, num_shortages: int, num_freed: int, num_moved: int
) -> None:
    """First without what is kept for later, then without tensors that nobody uses."""
    inline = client.raw_ops.FusedBatchNormV3(**BATCH_NORM)
    client.put(X, device="auto")
    device.num_shortages = num_shortages
    assert np.array_equal(client.raw_ops.FusedBatchNormV3(**BATCH_NORM).y, inline.y)
    assert device.num_freed == num_freed
    assert client.server_info().device_usage["num_evicted"] == num_moved


def test_an_op_for_which_there_is_no_memory_ends_so(client: gradserve.Client, device: SeparateDevice) -> None:
    client.put(X, device="auto")
    device.num_shortages = 1000
    with pytest.raises(
        gradserve.ResourceExhaustedError,
        match=rf"bytes asked for, \d+ in use, {LIMIT} allowed \(--max-device-bytes\); cuBLAS has no memory",
    ):
        client.raw_ops.FusedBatchNormV3(**BATCH_NORM)
    assert used(client) == (X.nbytes, 0, 0), "it has moved in vain, and nothing is left of the op"
    device.num_shortages = 0
    client.raw_ops.FusedBatchNormV3(**BATCH_NORM)


def test_few_threads_use_the_device(client: gradserve.Client, device: SeparateDevice) -> None:
    def use(_: int) -> None:
        kept = client.raw_ops.FusedBatchNormV3(x=client.put(X[:4], device="auto"), **PARAMS, keep=True)
        client.get(kept.y)
        acc = client.conditional_accumulator("float32", (3,), shared_name="sum")
        acc.apply_grad(kept.batch_mean)
        client.batch_norm(scope="layer").forward(client.put(X[:4]), is_training=True)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(use, range(16)))
    assert {name.rpartition("_")[0] for name in device.threads} == {"gradserve-ops"}
    assert len(device.threads) <= DEVICE_THREADS


def test_leases_end_while_the_device_is_busy(client: gradserve.Client, device: SeparateDevice) -> None:
    device.may_trim.clear()
    client.put(X, lease=0.01)
    eventually(client.list_tensors, lambda listed: not listed)
    client.put(X, lease=0.01)
    eventually(client.list_tensors, lambda listed: not listed)
    device.may_trim.set()


@pytest.mark.parametrize(("wanted", "limit"), [("1000", 1000), ("4 GiB", LIMIT), (None, LIMIT)])
def test_the_limit(device: SeparateDevice, wanted: str | None, limit: int) -> None:
    parts = Parts(choose_device=lambda *_: device, make_families=lambda *_: separate_families(device))
    config = {} if wanted is None else {"max_device_bytes": wanted}
    limits = LimitsConfig.model_validate(config)
    with LocalServer(ServerConfig(limits=limits), parts=parts) as local, gradserve.connect(local.address) as client:
        assert client.server_info().device_usage["max_bytes"] == limit


def test_the_figures_are_in_info(server: LocalServer, client: gradserve.Client) -> None:
    client.put(X, device="auto")
    figures = {
        "max_bytes": LIMIT,
        "computing_bytes": 0,
        "stored_bytes": X.nbytes,
        "accumulator_bytes": 0,
        "layer_bytes": 0,
        "cached_bytes": 1,
        "other_bytes": 2,
        "num_evicted": 0,
        "evicted_bytes": 0,
        "num_compiled": 3,
        "num_launches": 4,
        "bytes_to_device": X.nbytes,
        "bytes_to_host": 0,
        "wait": 0.5,
    }
    assert client.server_info().device_usage == figures
    shown, described_in_json = (CliRunner().invoke(cli, ["info", server.address, *more]) for more in ([], ["--json"]))
    assert (
        "separate:0:\n" + "".join(f"  {name}: {figure(name, value)}\n" for name, value in figures.items())
        in shown.stdout
    )
    described = json.loads(described_in_json.stdout)
    assert described["device_usage"] == figures
    assert described["device"] == "separate:0"


def test_a_server_on_the_cpu_has_none() -> None:
    limits = LimitsConfig(max_device_bytes=ByteSize(1))
    with LocalServer(ServerConfig(limits=limits)) as local, gradserve.connect(local.address) as client:
        client.get(client.raw_ops.FusedBatchNormV3(**BATCH_NORM, keep=True).y)
        assert client.server_info().device_usage == {}
