"""Printed, things say in a line or a few what they are, without asking the server."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import gradserve
import gradserve.aio
from gradserve_protocol.arrays import BFLOAT16
from tests.servers.connecting import transport_of

LARGE: NDArray[Any] = np.zeros((1000, 1000), np.float32)
ADJUSTMENT = gradserve.RandomAdjustment((0.9, 1.1), (0, 1), seed=1)
ROWS = gradserve.IndexedSlices(np.zeros((2, 3)), np.arange(2), (10, 3))


def test_a_client(server_address: str, client: gradserve.Client) -> None:
    assert repr(client) == f"<gradserve.Client {server_address}>"
    assert repr(client.raw_ops) == "<gradserve.RawOps>"


def test_accumulators(client: gradserve.Client, name: str) -> None:
    dense = client.conditional_accumulator("float32", (3,), f"{name}-dense")
    assert repr(dense) == f"<gradserve.ConditionalAccumulator default/{name}-dense: float32 (3,)>"
    sparse = client.sparse_conditional_accumulator("bfloat16", (None, 4), "rows", container=name)
    assert repr(sparse) == f"<gradserve.SparseConditionalAccumulator {name}/rows: sparse bfloat16 (?, 4)>"
    model = client.gradient_accumulator({"w": LARGE, "layers": [gradserve.DenseSpec("float16")]}, shared_name=name)
    assert repr(model) == (
        f"<gradserve.GradientAccumulator default/{name}: w float32 (1000, 1000), layers/0 float16 of any shape>"
    )


def test_a_layer(client: gradserve.Client, name: str) -> None:
    assert repr(client.batch_norm(scope=name)) == f"<gradserve.BatchNormLayer default/{name}>"


async def test_things_of_asyncio(server_address: str, name: str) -> None:
    async with gradserve.aio.connect(server_address) as client:
        assert repr(client) == f"<gradserve.aio.Client {server_address}>"
        dense = await client.conditional_accumulator("float32", (), name)
        assert repr(dense) == f"<gradserve.aio.ConditionalAccumulator default/{name}: float32 ()>"
        assert repr(await client.batch_norm(scope=name)) == f"<gradserve.aio.BatchNormLayer default/{name}>"


def test_no_server_is_asked(client: gradserve.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    things = [client, client.raw_ops, client.conditional_accumulator("float32"), client.batch_norm()]
    monkeypatch.setattr(transport_of(client), "run", lambda _: pytest.fail("a call was made"))
    for thing in things:
        assert repr(thing).startswith("<gradserve.")
    monkeypatch.undo()


def test_what_is_closed(server_address: str) -> None:
    with gradserve.connect(server_address) as client:
        accumulator = client.conditional_accumulator("float32", (3,))
    assert repr(client) == f"<gradserve.Client {server_address}>"
    assert "float32 (3,)" in repr(accumulator)


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (ROWS, "IndexedSlices(values=array([[0., 0., 0.], [0., 0., 0.]]), indices=array([0, 1]), dense_shape=(10, 3))"),
        (
            gradserve.IndexedSlices(LARGE, np.arange(1000)),
            "IndexedSlices(values=array(dtype=float32, shape=(1000, 1000)), indices=array(dtype=int64, shape=(1000,)), "
            "dense_shape=None)",
        ),
        (
            gradserve.Average({"w": LARGE, "e": ROWS}, {"w": LARGE, "e": ROWS}, 3, 2, 2.0, ("a", "b")),
            f"Average(components={{'w': array(dtype=float32, shape=(1000, 1000)), 'e': {ROWS}}}, step=3, "
            "num_gradients=2, total_weight=2.0, worker_ids=('a', 'b'))",
        ),
        (
            gradserve.Average({f"w{i}": np.zeros(0) for i in range(161)}, None, 1, 1, 1.0, ("a",)),
            "Average(components={"
            + ", ".join(f"'w{i}': array([], dtype=float64)" for i in range(6))
            + ", ... 155 more}, step=1, num_gradients=1, total_weight=1.0, worker_ids=('a',))",
        ),
        (
            gradserve.CudnnRNNParamsToCanonicalOutputs([LARGE] * 8, [np.ones(2, BFLOAT16)]),
            f"CudnnRNNParamsToCanonicalOutputs(weights=[{', '.join(['array(dtype=float32, shape=(1000, 1000))'] * 6)}, "
            "... 2 more], biases=[array([1, 1], dtype=bfloat16)])",
        ),
        (
            gradserve.TensorHandle("abc", np.dtype("<f4"), (2, 3)),
            "TensorHandle(handle='abc', dtype=float32, shape=(2, 3))",
        ),
        (
            gradserve.BatchNormGradients(LARGE, np.ones(2), None, None, None, None, {"beta": LARGE}),
            "BatchNormGradients(inputs=array(dtype=float32, shape=(1000, 1000)), beta=array([1., 1.]), gamma=None, "
            "batch_weights=None, adjustment_scale=None, adjustment_bias=None, "
            "regularization={'beta': array(dtype=float32, shape=(1000, 1000))})",
        ),
    ],
)
def test_results(result: object, expected: str) -> None:
    assert repr(result) == expected


def test_whatever_calls_return_is_short(client: gradserve.Client, name: str) -> None:
    x, ones = np.zeros((32, 8, 8, 16), np.float32), np.ones(16, np.float32)
    layer = client.batch_norm(scope=name, scale=True, adjustment=ADJUSTMENT)
    model = client.gradient_accumulator({f"w{i}": x for i in range(20)}, shared_name=name)
    applied = [model.apply_grad({f"w{i}": x for i in range(20)}, worker_id=f"worker-{k}") for k in range(30)]
    results = [
        applied[0],
        model.info(),
        model.take_grad(30),
        layer.forward(x),
        layer.backward(x),
        layer.describe(),
        client.raw_ops.FusedBatchNormV3(x=x, scale=ones, offset=ones, mean=[], variance=[]),
        client.put(x),
        client.server_info(),
    ]
    assert [type(each).__name__ for each in results if len(repr(each)) > 1700] == []
