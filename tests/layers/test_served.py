"""A layer on a real server under many callers at once, lost replies, and tensors that others use too."""

import itertools
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import ml_dtypes
import numpy as np
import pytest
from pydantic import ByteSize

import gradserve
from gradserve.testing import Faults
from gradserve_protocol.v1 import accumulator_messages_pb2, accumulator_pb2, layer_pb2, tensor_pb2
from gradserve_protocol.v1 import batch_norm_layer_messages_pb2 as messages_pb2
from gradserve_protocol.v1 import batch_norm_layer_pb2 as batch_norm_pb2
from gradserve_server.config import LimitsConfig, ServerConfig
from gradserve_server.parts import Parts
from gradserve_testing import LocalServer
from tests.servers.connecting import connect_with, without_retries
from tests.servers.polling import PATIENCE_SECONDS
from tests.servers.raw_calls import RawCalls

pytestmark = pytest.mark.usefixtures("_prepared_ops")  # so that equal calls give equal bits

T = TypeVar("T")

MANY = ["x"] * 65_536
MIB = 1 << 20


@pytest.fixture
def raw(server_address: str) -> Iterator[RawCalls]:
    with RawCalls(server_address) as calls:
        yield calls


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def ref(bn: Any) -> batch_norm_pb2.BatchNormLayerRef:
    return batch_norm_pb2.BatchNormLayerRef(container=bn.container, name=bn.name)


def numbered(number: int) -> np.ndarray:
    """Returns a batch with the mean and variance `number` squared, exactly."""
    return np.array([[number**2 - number] * 2, [number**2 + number] * 2], np.float64)


def at_once(pool: ThreadPoolExecutor, calls: list[Callable[[], T]]) -> list[T]:
    """Returns the results of calls that begin together."""
    barrier = threading.Barrier(len(calls))

    def begin(call: Callable[[], T]) -> T:
        barrier.wait()
        return call()

    return [future.result(PATIENCE_SECONDS) for future in [pool.submit(begin, call) for call in calls]]


START = {"moving_mean": [0.0, 0.0], "moving_variance": [0.0, 0.0]}


def averaging_layer(client: gradserve.Client, **arguments: Any) -> Any:
    """Returns a layer of doubles whose averages begin at 0, and so are equal when their batches are `numbered`."""
    arguments = {"updates_collections": None, "fused": False, "decay": 0.5, **arguments}
    return client.batch_norm(param_initializers=START, dtype="float64", input_shape=(None, 2), **arguments)


def test_several_large_initial_values(client: gradserve.Client) -> None:
    """They come beside the message, in one payload."""
    values = {name: np.full(8192, value, np.float32) for value, name in enumerate(("beta", "gamma", "moving_mean"))}
    bn = client.batch_norm(scale=True, param_initializers=values, input_shape=(None, 8192), dtype="float32")
    assert {name: float(bn.variables[name].mean()) for name in values} == {"beta": 0, "gamma": 1, "moving_mean": 2}


class TestManyCallers:
    def test_updates_in_place_are_in_some_order(self, client: gradserve.Client, threads: ThreadPoolExecutor) -> None:
        numbers = range(1, 7)
        possible = set()
        for order in itertools.permutations(numbers):
            mean = 0.0
            for number in order:
                mean += (number**2 - mean) / 2
            possible.add(mean)
        for _ in range(5):
            bn = averaging_layer(client)
            at_once(threads, [partial(bn.forward, numbered(number)) for number in numbers])
            found = bn.variables
            assert found["moving_mean"][0] in possible
            np.testing.assert_array_equal(found["moving_mean"], found["moving_variance"])
            assert bn.describe().num_updates == len(numbers)
            bn.delete()

    def test_variables_are_those_of_one_moment(self, client: gradserve.Client, threads: ThreadPoolExecutor) -> None:
        """The mean and variance of each update are equal: unequal ones would be of two moments."""
        bn = averaging_layer(client)
        done, have_begun = threading.Event(), threading.Barrier(3)

        def train(worker: int) -> None:
            for step in range(60):
                bn.forward(numbered(worker + 3 * step), keep_for_backward=False)
                if step % 10 == 0:
                    bn.set_variables({name: [step, step] for name in START})

        def read() -> int:
            seen = set()
            for number in itertools.count():
                is_last = done.is_set()
                found = bn.variables
                np.testing.assert_array_equal(found["moving_mean"], found["moving_variance"])
                seen.add(found["moving_mean"][0])
                if is_last:
                    break
                if not number:
                    have_begun.wait(PATIENCE_SECONDS)
            return len(seen)

        readers = [threads.submit(read) for _ in range(2)]
        have_begun.wait(PATIENCE_SECONDS)
        try:
            at_once(threads, [partial(train, worker) for worker in range(4)])
        finally:
            done.set()
        assert all(reader.result(PATIENCE_SECONDS) > 1 for reader in readers)
        assert bn.describe().num_updates == 4 * 60

    def test_a_layer_is_deleted_under_them(self, threads: ThreadPoolExecutor) -> None:
        x = np.ones((512, 512), np.float32)
        with LocalServer() as server, gradserve.connect(server.address, timeout=PATIENCE_SECONDS) as client:
            for _ in range(5):
                bn = client.batch_norm(updates_collections=None)
                bn.forward(x)

                is_over = threading.Event()

                def train(bn: Any = bn, is_over: threading.Event = is_over) -> None:
                    while not is_over.is_set():
                        try:
                            bn.backward(x, bn.forward(x))
                        except (gradserve.NotFoundError, gradserve.AbortedError):
                            return
                    raise AssertionError("it was never deleted")

                trainers = [threads.submit(train) for _ in range(4)]
                try:
                    client.server_info()
                    assert bn.delete()
                    for trainer in trainers:
                        trainer.result(PATIENCE_SECONDS)
                finally:
                    is_over.set()
            usage = client.server_info().usage
            assert (usage["num_bytes"], usage["num_handles"], usage["num_layers"]) == (0, 0, 0)


def persist(call: Callable[[], T]) -> T:
    for _ in range(200):
        try:
            return call()
        except gradserve.UnavailableError:
            continue
    raise AssertionError("not acknowledged in 200 attempts")


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("updates", [None, "update_ops"], ids=["in place", "delayed"])
def test_every_forward_counts_once_though_replies_are_lost(threads: ThreadPoolExecutor, updates: str | None) -> None:
    """Each is sent by two clients at once, while others run the updates; with decay d, n of them leave d^n."""
    methods = ("CreateBatchNormLayer", "BatchNormForward", "RunBatchNormUpdates", "BatchNormBackward")
    replies = Faults()
    lost = replies.drop_reply(*methods, times=None, probability=0.33, seed=5)
    ids = [uuid.uuid4().hex for _ in range(40)]
    with (
        LocalServer(parts=Parts(interceptors=(replies,))) as server,
        connect_with(server.address, without_retries(PATIENCE_SECONDS)) as client,
    ):
        bn = persist(lambda: averaging_layer(client, updates_collections=updates, decay=0.75, scope="bn"))
        bn.set_variables({name: [1.0, 1.0] for name in START})

        def train(worker: int) -> None:
            for forward_id in ids[worker // 2 :: 2]:
                forward = persist(partial(bn.forward, numbered(0), forward_id=forward_id))
                persist(partial(bn.backward, numbered(1), forward, retain=True))
                persist(bn.run_updates)

        at_once(threads, [partial(train, worker) for worker in range(4)])
        persist(bn.run_updates)
        assert bn.describe().num_updates == len(ids)
        np.testing.assert_allclose(bn.variables["moving_mean"], [0.75 ** len(ids)] * 2, rtol=1e-12)
        bn.delete()
        usage = client.server_info().usage
        assert (usage["num_bytes"], usage["num_handles"]) == (0, 0)
    assert {"BatchNormForward", "BatchNormBackward"} <= set(lost.happened)


def test_updates_of_a_collection_across_layers(client: gradserve.Client, name: str) -> None:
    tags = {"a": "one", "b": "two", "c": ["one", "two"], "d": None}
    layers = {
        scope: averaging_layer(client, scope=scope, container=name, updates_collections=collections)
        for scope, collections in tags.items()
    }
    made = {scope: [bn.forward(numbered(number)) for number in (2, 4)] for scope, bn in layers.items()}

    def run(collection: str, container: str = name, *forward_ids: str) -> int:
        with RawCalls(client.address) as raw:
            target = layer_pb2.LayerCollectionRef(container=container, name=collection)
            request = messages_pb2.RunBatchNormUpdatesRequest(collection=target, forward_ids=forward_ids)
            num_run: int = raw.call("RunBatchNormUpdates", request).num_run
            return num_run

    assert run("one", "elsewhere") == run("three") == 0
    assert run("one", name, made["c"][1].forward_id, made["b"][0].forward_id, "nobody") == 1
    assert run("one") == 3
    assert run("one") == 0
    assert run("two") == 2
    means = {scope: bn.variables["moving_mean"][0] for scope, bn in layers.items()}
    in_order, reversed_order = (4 / 2 + 16) / 2, (16 / 2 + 4) / 2
    assert means == {"a": in_order, "b": in_order, "c": reversed_order, "d": in_order}
    for bn in layers.values():
        bn.delete()


def test_pages_of_a_list_that_changes(client: gradserve.Client, raw: RawCalls, name: str) -> None:
    layers = {
        scope: client.batch_norm(scope=scope, container=name, variables_collections={"beta": scope[:1]})
        for scope in [f"{letter}/{number:02}" for letter in "ab" for number in range(20)]
    }

    def pages(change: Callable[[], Any] = lambda: None, **fields: Any) -> Iterator[list[str]]:
        token = ""
        while True:
            request = messages_pb2.ListBatchNormLayersRequest(container=name, page_size=7, page_token=token, **fields)
            page = raw.call("ListBatchNormLayers", request)
            yield [each.layer.name for each in page.layers]
            token = page.next_page_token
            if not token:
                return
            change()

    def listed(**fields: Any) -> list[str]:
        return list(itertools.chain(*pages(**fields)))

    everything = sorted(layers)
    assert [len(page) for page in pages()] == [7, 7, 7, 7, 7, 5]
    assert listed() == everything
    assert listed(scope="b/") == listed(collection="b") == everything[20:]
    assert listed(scope="b/1") == everything[30:]
    assert list(pages(collection="nobody")) == list(pages(scope="c")) == [[]]
    # What goes after it was listed, or comes before, is not seen; the rest is, once.
    gone = iter(everything)
    assert listed(change=lambda: layers.pop(next(gone)).delete()) == everything
    assert listed() == sorted(layers) == everything[5:]
    for bn in layers.values():
        bn.delete()


def give_away(raw: RawCalls, handle: str, accumulator: str) -> None:
    """Applies a stored gradient whose memory the accumulator may take over."""
    part = accumulator_pb2.ComponentGradient(dense=tensor_pb2.Tensor(handle=handle))
    request = accumulator_messages_pb2.ApplyGradientRequest(
        accumulator=accumulator_pb2.AccumulatorRef(name=accumulator), gradient=[part], release_handles=True
    )
    raw.call("ApplyGradient", request)


def test_inputs_that_are_given_away_stay_what_they_were(client: gradserve.Client, raw: RawCalls, name: str) -> None:
    """An accumulator takes over the memory of a stored gradient, and adds to it in place; not here."""
    x = np.random.default_rng(0).normal(size=(256, 128)).astype(np.float32)
    dy = np.random.default_rng(1).normal(size=x.shape).astype(np.float32)
    bn = client.batch_norm(updates_collections=None)
    expected = bn.backward(dy, bn.forward(x)).inputs
    handle = client.put(x)
    forward = bn.forward(handle)
    acc = client.conditional_accumulator("float32", x.shape, name)
    give_away(raw, handle.handle, name)
    assert handle not in client.list_tensors()
    acc.apply_grad(np.full_like(x, 1e6))
    np.testing.assert_array_equal(bn.backward(dy, forward).inputs, expected)
    np.testing.assert_allclose(acc.take_grad(2), (x + np.float32(1e6)) / 2, rtol=1e-6)
    acc.delete()


def test_values_that_are_given_away_stay_what_they_were(client: gradserve.Client, raw: RawCalls, name: str) -> None:
    """So too a variable that was set by handle, and one that was read as a handle."""
    bn = client.batch_norm(dtype="float32", input_shape=(None, 30_000))
    values = np.arange(30_000, dtype=np.float32)
    handle = client.put(values)
    bn.set_variables({"beta": handle})
    placement = tensor_pb2.Placement(mode=tensor_pb2.Placement.MODE_KEEP)
    request = messages_pb2.GetBatchNormVariablesRequest(layer=ref(bn), names=["beta"], placement=placement)
    read = raw.call("GetBatchNormVariables", request).variables[0].tensor.handle
    acc = client.conditional_accumulator("float32", values.shape, name)
    for each in (handle.handle, read):
        give_away(raw, each, name)
        acc.apply_grad(np.ones_like(values))
        np.testing.assert_array_equal(bn.variables["beta"], values)
    acc.delete()


@pytest.mark.parametrize(
    ("dtype", "fused"),
    [(dtype, fused) for dtype in (np.float16, ml_dtypes.bfloat16, np.float32) for fused in (None, False)]
    + [(np.float64, False)],
)
@pytest.mark.parametrize("keep", [False, True], ids=["inline", "by handle"])
def test_dtypes(client: gradserve.Client, dtype: Any, fused: bool | None, keep: bool) -> None:
    x = np.random.default_rng(0).normal(2, 3, (16, 3)).astype(dtype)
    given: Any = client.put(x) if keep else x
    with client.batch_norm(fused=fused, scale=True) as bn:
        forward: Any = bn.forward(given, keep=keep)
        outputs = client.get(forward.outputs, release=True) if keep else forward.outputs
        gradients: Any = bn.backward(given, forward, keep=keep)
        found = client.get(gradients.inputs, release=True) if keep else gradients.inputs
        assert outputs.dtype == found.dtype == dtype
        digits = {2: 1e-2, 4: 1e-5, 8: 1e-12}[np.dtype(dtype).itemsize]
        wide = x.astype(np.float64)
        normal = (wide - wide.mean(0)) / np.sqrt(wide.var(0) + 0.001)
        np.testing.assert_allclose(outputs.astype(np.float64), normal, atol=2 * digits)
        # With dy = x the gradient is what is left of x without its mean and deviation: about nothing.
        np.testing.assert_allclose(found.astype(np.float64), np.zeros_like(wide), atol=2e-3)
        variables = bn.variables
        assert {value.dtype for value in variables.values()} == {np.dtype("float64" if digits < 1e-9 else "float32")}
        if keep:
            assert client.delete(given, gradients.beta, gradients.gamma) == 3


def test_a_result_that_does_not_fit_changes_nothing(name: str) -> None:
    limits = LimitsConfig(max_handles=3, max_bytes=ByteSize(28 * MIB))
    x = np.ones((MIB, 2), np.float32)
    with (
        LocalServer(ServerConfig(limits=limits)) as server,
        gradserve.connect(server.address, timeout=PATIENCE_SECONDS, transport="grpc") as client,
    ):
        bn = client.batch_norm(updates_collections=None, decay=0.5)
        held = client.put_all([[1.0], [1.0]])
        before = client.server_info().usage
        # A handle for the outputs and one for what is kept: one too many.
        with pytest.raises(gradserve.ResourceExhaustedError, match="too many tensor handles"):
            bn.forward([[1.0, 2.0]], keep=True, forward_id="a")
        assert bn.describe().num_updates == bn.describe().num_forwards == 0
        assert client.delete(*held) == 2
        forward = bn.forward([[1.0, 2.0]], keep=True, forward_id="a")
        with pytest.raises(gradserve.ResourceExhaustedError, match="too many tensor handles"):
            bn.backward([[1.0, 2.0]], forward, keep=True)
        beta = bn.backward([[1.0, 2.0]], forward).beta
        assert beta is not None
        assert beta.tolist() == [1.0, 2.0]
        assert client.delete(forward.outputs) == 1
        # What is uploaded, the outputs, and what is kept: thrice 8 MiB fit, four times do not.
        kept = bn.forward(x, keep_for_backward=False)
        first = bn.forward(x)
        with pytest.raises(gradserve.ResourceExhaustedError, match="too many bytes of tensor memory"):
            bn.forward(x)
        assert bn.release(first) == 1
        assert kept.outputs.shape == x.shape
        bn.delete()
        usage = client.server_info().usage
        assert usage["num_bytes"] == usage["num_handles"] == 0
        assert usage["num_layers"] == before["num_layers"] - 1


def test_forwards_that_are_unknown_are_passed_over(client: gradserve.Client, raw: RawCalls) -> None:
    bn = averaging_layer(client, updates_collections="mine")
    x = tensor_pb2.Tensor(dtype=tensor_pb2.DATA_TYPE_FLOAT64, shape=(2, 2), content=numbered(2).tobytes())
    request = messages_pb2.BatchNormForwardRequest(layer=ref(bn), inputs=x, forward_id="a", released_forward_ids=MANY)
    assert raw.call("BatchNormForward", request).has_pending_updates
    assert raw.call(
        "ReleaseBatchNormForwards", messages_pb2.ReleaseBatchNormForwardsRequest(layer=ref(bn), forward_ids=MANY)
    ) == (messages_pb2.ReleaseBatchNormForwardsResponse())
    updates = messages_pb2.RunBatchNormUpdatesRequest(layer=ref(bn), forward_ids=[*MANY[1:], "a"])
    assert raw.call("RunBatchNormUpdates", updates).num_run == 1
    bn.delete()
