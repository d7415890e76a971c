"""A training session that calls most of the contract, with what it must see; its calls are recorded for later versions.

What it calls must not change once a recording of it is released: a new session gets a file of its own.
"""

import numpy as np

import gradserve
from tests.servers.polling import PATIENCE_SECONDS

IMAGES = np.arange(12, dtype=np.float32).reshape(1, 2, 2, 3)


def run(address: str) -> None:
    """Trains over gRPC alone: averages, parameters, a layer, stored tensors, an op, and what is private to the client.

    Raises:
        AssertionError: An answer is not what it has to be.
    """
    with gradserve.connect(address, transport="grpc", timeout=PATIENCE_SECONDS) as client:
        assert client.server_info().version
        _averages(client)
        _parameters(client)
        _layer(client)
        _tensors(client)
        _op(client)


def _averages(client: gradserve.Client) -> None:
    template = {"w": np.ones(2, np.float32), "rows": gradserve.SparseSpec("float64")}
    rows = gradserve.IndexedSlices(np.ones((1, 2)), np.array([5]))
    model = client.gradient_accumulator(
        template, shared_name="model", container="run", deterministic=True, keep_averages=2, agreement={"workers": "2"}
    )
    applied = model.apply_grad({"w": np.array([1, 3], np.float32), "rows": rows}, worker_id="w0", weight=3.0)
    assert applied.outcome is gradserve.Outcome.ACCEPTED
    assert model.num_accumulated() == 1
    result = model.push_pull({"w": np.array([5, 7], np.float32), "rows": rows}, num_required=2, worker_id="w1")
    assert (result["w"].tolist(), result.global_step) == ([2, 4], 1)
    stale = model.apply_grad({"w": np.zeros(2, np.float32), "rows": rows}, local_step=0, worker_id="w0")
    assert stale.outcome is gradserve.Outcome.STALE
    assert model.read_average(1)["w"].tolist() == [2, 4]
    model.set_global_step(7)
    assert model.info().global_step == 7
    assert [each.name for each in client.list_accumulators("run")] == ["model"]

    private = client.conditional_accumulator("bfloat16", (2,))
    handle = client.put(np.array([2, 4], np.float32))
    private.apply_grad(handle, worker_id="w0")
    assert private.take_grad(1).astype(np.float64).tolist() == [2, 4]

    assert model.delete()
    try:
        model.num_accumulated()
    except gradserve.NotFoundError:
        pass
    else:
        raise AssertionError("the accumulator was deleted")


def _parameters(client: gradserve.Client) -> None:
    llm = client.parameters(
        {"w": np.zeros(4, np.float32)},
        shared_name="llm",
        optimizer=gradserve.optim.SGD(lr=0.5, momentum=0.5),
        num_required=2,
        keep_versions=3,
    )
    assert llm.read()["w"].tolist() == [0] * 4
    llm.push({"w": np.full(4, 2, np.float32)}, 0, worker_id="w0", metrics={"loss": 1.0})
    pulled = llm.push_pull({"w": np.full(4, 6, np.float32)}, 0, worker_id="w1", metrics={"loss": 3.0})
    assert pulled.version["w"].tolist() == [2] * 4  # half of the mean
    assert llm.read(1, codec="bf16")["w"].tolist() == [2] * 4
    llm.report({"accuracy": 0.5}, 1, worker_id="evaluator")
    assert [dict(each.metrics) for each in llm.evaluations()] == [{"accuracy": 0.5}]
    assert [each.metrics["loss"] for each in llm.rounds()] == [2.0]
    llm.change(num_required=1)
    forked = llm.fork(shared_name="fork")
    assert forked.info().step == 1
    assert sorted(each.name for each in client.list_parameters()) == ["fork", "llm"]
    assert forked.delete()
    assert client.delete_parameters("llm")


def _layer(client: gradserve.Client) -> None:
    layer = client.batch_norm(scope="bn", scale=True, epsilon=0.0, decay=0.5)
    forward = layer.forward(np.array([[0, 2], [2, 6]], np.float32))
    assert np.asarray(forward.outputs).tolist() == [[-1, -1], [1, 1]]
    gradients = layer.backward(np.array([[1, 0], [0, 1]], np.float32))
    assert np.allclose(np.asarray(gradients.inputs), 0, atol=1e-5)
    assert layer.run_updates() == 1
    assert layer.get_variables("moving_mean")["moving_mean"].tolist() == [0.5, 2]
    layer.set_variables({"beta": np.ones(2, np.float32)})
    layer.release(layer.forward(np.array([[0, 2], [2, 6]], np.float32), keep_for_backward=True))
    assert layer.describe().name == "bn"
    assert [each.name for each in client.list_batch_norm_layers()] == ["bn"]
    assert layer.delete()


def _tensors(client: gradserve.Client) -> None:
    handles = client.put_all([np.arange(3), np.float16(2)], lease=60)
    assert [each.tolist() for each in client.get_all(handles)] == [[0, 1, 2], 2]
    assert set(handles) <= set(client.list_tensors())
    assert client.delete(*handles) == 2


def _op(client: gradserve.Client) -> None:
    scale = np.ones(3, np.float32)
    outputs = client.raw_ops.FusedBatchNormV3(x=IMAGES, scale=scale, offset=scale, mean=[], variance=[])
    assert np.asarray(outputs.batch_mean).tolist() == [4.5, 5.5, 6.5]
    x = np.array([[1, 3]], np.float32)
    normalized = client.raw_ops.LayerNorm(x=x, scale=np.ones(2, np.float32), offset=np.zeros(2, np.float32))
    assert np.allclose(np.asarray(normalized.y), [[-1, 1]], atol=1e-2)
