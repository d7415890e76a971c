"""What a type checker knows of the client. `make types` checks it; nothing of this runs.

Each `type: ignore` is an assertion, too: without the error, mypy says that it is not used.
"""

from collections.abc import Mapping
from typing import Any, Protocol, assert_type

import numpy as np
from numpy.typing import NDArray

import gradserve
import gradserve.aio
from gradserve import TensorHandle

Arrays = NDArray[Any]


def tensors(client: gradserve.Client) -> None:
    handle = client.put([1.0, 2.0])
    assert_type(handle, TensorHandle)
    assert_type(client.empty((2, 3), "float32"), NDArray[Any])
    assert_type(client.new_request_id(), int)
    assert_type(client.put_all([[1.0], np.zeros(3)], lease=5), list[TensorHandle])
    assert_type(client.get(handle), Arrays)
    assert_type(client.get_all([handle]), list[Arrays])
    assert_type(client.delete(handle), int)
    assert_type(client.server_info(), gradserve.ServerInfo)
    client.get("w")  # type: ignore[arg-type]
    client.get(handle, relase=True)  # type: ignore[call-arg]


def accumulators(client: gradserve.Client) -> None:
    dense = client.conditional_accumulator("float32", (3,), "w")
    assert_type(dense, gradserve.ConditionalAccumulator)
    assert_type(dense.apply_grad([1.0, 2.0, 3.0], local_step=0), gradserve.ApplyResult)
    assert_type(dense.take_grad(2, timeout=30), Arrays)
    assert_type(dense.read_average(), Arrays)
    assert_type(dense.info(), gradserve.AccumulatorInfo)
    assert_type(dense.name, str)
    dense.take_grad("two")  # type: ignore[arg-type]
    dense.push_pull({}, 2)  # type: ignore[attr-defined]

    sparse = client.sparse_conditional_accumulator("float32")
    assert_type(sparse.take_grad(1), gradserve.IndexedSlices)
    assert_type(sparse.take_indexed_slices_grad(1).values, Arrays)


def parameters(client: gradserve.Client) -> None:
    optimizer = gradserve.optim.SGD(0.7, momentum=0.9, nesterov=True)
    held = client.parameters({"w": [1.0]}, "llm", optimizer=optimizer, grace="adaptive", expected="alive")
    assert_type(held, gradserve.Parameters)
    version = held.read()
    assert_type(version, gradserve.Version)
    assert_type(version["w"], Arrays)
    assert_type(held.push({"w": [1.0]}, version, weight=3), gradserve.PushResult)
    assert_type(held.push_pull({"w": [1.0]}, 0).version, gradserve.Version)
    assert_type(held.rounds(), list[gradserve.RoundRecord])
    assert_type(held.change(num_required=2, schedule=None), gradserve.ParametersInfo)
    assert_type(held.fork(shared_name="other"), gradserve.Parameters)
    assert_type(client.list_parameters(), list[gradserve.ParametersInfo])
    client.parameters(gradserve.load_parameters("llm.safetensors"), reduction=gradserve.reductions.krum(1))
    held.push({"w": [1.0]})  # type: ignore[call-arg]
    held.change(grace="sometimes")  # type: ignore[arg-type]


async def awaited_parameters(client: gradserve.aio.Client) -> None:
    held = await client.parameters({"w": [1.0]}, "llm")
    assert_type(held, gradserve.aio.Parameters)
    assert_type(await held.fork(shared_name="other"), gradserve.aio.Parameters)
    assert_type(await held.push_pull({"w": [1.0]}, 0), gradserve.PushPull)


class Tensor(Protocol):
    """Of a library that has DLPack and dtypes of its own, as PyTorch."""

    dtype: object

    def __dlpack__(self) -> Any: ...

    def __dlpack_device__(self) -> tuple[int, int]: ...


def other_libraries(client: gradserve.Client, tensor: Tensor) -> None:
    client.put(tensor)
    client.conditional_accumulator(tensor.dtype).apply_grad(tensor)
    client.sparse_conditional_accumulator(tensor.dtype).apply_grad(tensor, tensor)
    client.raw_ops.GRUBlockCell(x=tensor, h_prev=tensor, w_ru=tensor, w_c=tensor, b_ru=tensor, b_c=tensor)
    client.batch_norm()(tensor)
    client.put(object())  # type: ignore[arg-type]


def models(client: gradserve.Client, gradients: Mapping[str, NDArray[np.float32]]) -> NDArray[np.float32]:
    model = client.gradient_accumulator(gradients, shared_name="net")
    result = model.push_pull(gradients, num_required=4, local_step=1)
    assert_type(result, gradserve.PushPullResult)
    assert_type(result.outcome, gradserve.Outcome)
    assert_type(model.take_grad(4), gradserve.Average)
    assert_type(result["w"], Arrays | Any)
    if isinstance(rows := result["embedding"], gradserve.IndexedSlices):
        assert_type(rows.indices, Arrays)
    print(result["w"].indices)  # type: ignore[union-attr]
    weights = np.zeros(3, np.float32)
    weights -= 0.1 * result["w"]
    return weights


def ops(client: gradserve.Client, x: NDArray[np.float32], *, anywhere: bool) -> None:
    forward = client.raw_ops.FusedBatchNormV3(x=x, scale=[1.0], offset=[0.0], mean=[], variance=[])
    assert_type(forward, gradserve.FusedBatchNormV3Outputs[Arrays])
    assert_type(forward.y, Arrays)
    kept = client.raw_ops.FusedBatchNormV3(x=client.put(x), scale=[1.0], offset=[0.0], mean=[], variance=[], keep=True)
    assert_type(kept.y, TensorHandle)
    either = client.raw_ops.FusedBatchNorm(x=x, scale=[1.0], offset=[0.0], mean=[], variance=[], keep=anywhere)
    assert_type(either.y, Arrays | TensorHandle)
    client.raw_ops.FusedBatchNormV3(x)  # type: ignore[call-overload]

    four = client.raw_ops.GRUBlockCellGrad(
        x=x, h_prev=x, w_ru=x, w_c=x, b_ru=x, b_c=x, r=x, u=x, c=x, d_h=x, weight_gradients=False
    )
    assert_type(four.d_x, Arrays)
    eight = client.raw_ops.GRUBlockCellGrad(
        x=x, h_prev=x, w_ru=x, w_c=x, b_ru=x, b_c=x, r=x, u=x, c=x, d_h=x, weight_gradients=True, keep=True
    )
    assert_type(eight.d_w_ru, TensorHandle)
    size = client.raw_ops.CudnnRNNParamsSize(num_layers=1, num_units=2, input_size=3)
    assert_type(size, Arrays)
    weights = client.raw_ops.CudnnRNNParamsToCanonical(
        num_layers=1, num_units=2, input_size=3, params=x, num_params=8
    ).weights
    assert_type(weights, list[Arrays])
    taken = client.raw_ops.SparseAccumulatorTakeGradient(
        handle=client.sparse_conditional_accumulator("float32"), num_required=1, dtype=np.float32
    )
    assert_type(taken.indices, NDArray[np.int64])


def layers(client: gradserve.Client, x: NDArray[np.float32]) -> None:
    layer = client.batch_norm(scale=True, scope="bn")
    assert_type(layer, gradserve.BatchNormLayer)
    assert_type(layer(x), Arrays)
    assert_type(layer(x, keep=True), TensorHandle)
    forward = layer.forward(x)
    assert_type(forward.outputs, Arrays)
    gradients = layer.backward(x, forward)
    assert_type(gradients.inputs, Arrays)
    assert_type(gradients.gamma, Arrays | None)
    assert_type(layer.backward(x, layer.forward(x, keep=True), keep=True).inputs, TensorHandle)
    assert_type(layer.variables, dict[str, Arrays])


async def awaited(client: gradserve.aio.Client, x: NDArray[np.float32]) -> None:
    handle = await client.put(x)
    assert_type(handle, TensorHandle)
    assert_type(await client.get(handle), Arrays)
    dense = await client.conditional_accumulator("float32")
    assert_type(dense, gradserve.aio.ConditionalAccumulator)
    assert_type(await dense.take_grad(1), Arrays)
    forward = await client.raw_ops.FusedBatchNormV3(x=x, scale=[1.0], offset=[0.0], mean=[], variance=[])
    assert_type(forward.y, Arrays)
    layer = await client.batch_norm()
    assert_type(await layer(x, keep=True), TensorHandle)
    dense.take_grad(1) + 1  # type: ignore[operator]
