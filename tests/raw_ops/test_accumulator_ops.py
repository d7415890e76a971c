"""The accumulator ops: TensorFlow's names, arguments, outputs and refusals.

What the ops do is in tests/accumulators/test_scenarios.py.
"""

import inspect
import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import FrozenInstanceError
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gradserve
import gradserve.aio
from gradserve import AccumulatorKind
from tests.raw_ops.accumulator_table import CREATING, REQUIRED
from tests.servers.polling import PATIENCE_SECONDS, eventually

FAMILIES = ("", "Resource")


@pytest.fixture
def ops(client: gradserve.Client) -> gradserve.RawOps:
    return client.raw_ops


@pytest.fixture
def other(server_address: str) -> Iterator[gradserve.Client]:
    with gradserve.connect(server_address, timeout=PATIENCE_SECONDS) as connected:
        yield connected


def dense(ops: gradserve.RawOps, dtype: str = "float32", **options: Any) -> gradserve.AccumulatorHandle:
    return ops.ConditionalAccumulator(dtype=dtype, shape=None, **options)


def apply(ops: gradserve.RawOps, handle: Any, *values: float) -> None:
    for value in values:
        gradient = np.array([value], np.float32)
        ops.AccumulatorApplyGradient(handle=handle, local_step=0, gradient=gradient)


def take(ops: gradserve.RawOps, handle: Any, num_required: int = 1, **options: Any) -> Any:
    return ops.AccumulatorTakeGradient(handle=handle, num_required=num_required, dtype="float32", **options)


@pytest.mark.parametrize("op", list(REQUIRED))
def test_arguments_are_tensorflows(op: str) -> None:
    parameters = dict(inspect.signature(getattr(gradserve.RawOps, op)).parameters)
    parameters.pop("self")
    assert {each.kind for each in parameters.values()} == {inspect.Parameter.KEYWORD_ONLY}
    assert tuple(name for name, each in parameters.items() if each.default is inspect.Parameter.empty) == REQUIRED[op]
    if op in CREATING:
        defaults = {name: parameters[name].default for name in ("container", "shared_name", "reduction_type", "name")}
        assert defaults == {"container": "", "shared_name": "", "reduction_type": "MEAN", "name": None}


def test_every_accumulator_op_is_in_the_table() -> None:
    assert {name for name in vars(gradserve.RawOps) if "Accumulator" in name} == set(REQUIRED) - {"DestroyResourceOp"}


@pytest.mark.parametrize("op", CREATING)
def test_the_handle_names_the_accumulator(client: gradserve.Client, name: str, op: str) -> None:
    handle = getattr(client.raw_ops, op)(dtype="bfloat16", shape=(2, None), container="c", shared_name=name)
    kind = AccumulatorKind.SPARSE if op.startswith("Sparse") else AccumulatorKind.DENSE
    assert (handle.container, handle.name, handle.kind) == ("c", name, kind)
    assert handle.dtype == ml_dtypes.bfloat16
    assert handle.incarnation
    assert name in [info.name for info in client.list_accumulators("c")]
    client.raw_ops.DestroyResourceOp(resource=handle)


def test_a_handle_is_a_value(ops: gradserve.RawOps) -> None:
    handle = dense(ops)
    with pytest.raises(FrozenInstanceError):
        handle.name = "another"  # type: ignore[misc]
    assert len({handle, pickle.loads(pickle.dumps(handle))}) == 1  # noqa: S301


def test_other_clients_can_use_a_handle(ops: gradserve.RawOps, other: gradserve.Client) -> None:
    handle = dense(ops)
    apply(other.raw_ops, pickle.loads(pickle.dumps(handle)), 1)  # noqa: S301
    apply(ops, handle, 3)
    assert take(other.raw_ops, handle, 2) == 2


def test_a_shared_name_finds_the_same(ops: gradserve.RawOps, other: gradserve.Client, name: str) -> None:
    first = ops.ConditionalAccumulator(dtype="float32", shape=(1,), shared_name=name)
    listed: Any = [1]
    second = other.raw_ops.ResourceConditionalAccumulator(dtype="float32", shape=listed, shared_name=name)
    viewed = other.conditional_accumulator("float32", (1,), name)
    assert first == second == viewed.accumulator_ref
    apply(ops, second, 1)
    viewed.apply_grad([3])
    assert take(ops, first, 2) == 2
    ops.DestroyResourceOp(resource=first)


def test_containers_are_apart(ops: gradserve.RawOps, name: str) -> None:
    here, there = (dense(ops, shared_name=name, container=container) for container in ("", "there"))
    apply(ops, here, 1)
    assert (here.container, there.container) == ("default", "there")
    assert ops.AccumulatorNumAccumulated(handle=there) == 0
    for handle in (here, there):
        ops.DestroyResourceOp(resource=handle)


@pytest.mark.parametrize(
    ("op", "changes", "difference"),
    [
        ("ConditionalAccumulator", {"dtype": "float64"}, "dtype"),
        ("ConditionalAccumulator", {"shape": (2,)}, "shape"),
        ("ConditionalAccumulator", {"reduction_type": "SUM"}, "reduction"),
        ("SparseConditionalAccumulator", {}, "layout"),
    ],
)
def test_a_shared_name_with_another_spec(
    ops: gradserve.RawOps, name: str, op: str, changes: dict[str, Any], difference: str
) -> None:
    spec: dict[str, Any] = {"dtype": "float32", "shape": (1,), "shared_name": name}
    handle = ops.ConditionalAccumulator(**spec)
    with pytest.raises(gradserve.AlreadyExistsError, match=difference):
        getattr(ops, op)(**{**spec, **changes})
    ops.DestroyResourceOp(resource=handle)


@pytest.mark.parametrize("op", CREATING)
def test_without_a_shared_name_it_ends_with_its_client(client: gradserve.Client, server_address: str, op: str) -> None:
    with gradserve.connect(server_address, timeout=PATIENCE_SECONDS) as short:
        first, second, named = (
            getattr(short.raw_ops, op)(dtype="float32", shape=None, **options) for options in ({}, {}, {"name": "mine"})
        )
        assert len({first.name, second.name, named.name}) == 3
        assert first.name.startswith(f"{op}-")
        assert named.name.startswith("mine-")
        assert client.raw_ops.AccumulatorNumAccumulated(handle=first) == 0
    for handle in (first, second, named):
        with pytest.raises(gradserve.NotFoundError):
            client.raw_ops.AccumulatorNumAccumulated(handle=handle)


def test_a_handle_does_not_reach_the_next_of_its_name(ops: gradserve.RawOps, name: str) -> None:
    gone = dense(ops, shared_name=name)
    ops.DestroyResourceOp(resource=gone, ignore_lookup_error=False)
    present = dense(ops, shared_name=name)
    for call in (
        lambda: apply(ops, gone, 1),
        lambda: take(ops, gone),
        lambda: ops.AccumulatorNumAccumulated(handle=gone),
        lambda: ops.AccumulatorSetGlobalStep(handle=gone, new_global_step=1),
        lambda: ops.DestroyResourceOp(resource=gone, ignore_lookup_error=False),
    ):
        with pytest.raises(gradserve.NotFoundError):
            call()
    ops.DestroyResourceOp(resource=gone)
    assert ops.AccumulatorNumAccumulated(handle=present) == 0
    ops.DestroyResourceOp(resource=present)


def test_destroying_ends_waits(ops: gradserve.RawOps, client: gradserve.Client) -> None:
    handle = dense(ops)
    with ThreadPoolExecutor(1) as threads:
        taken = threads.submit(take, ops, handle)
        eventually(lambda: waiting(client, handle) == 1)
        ops.DestroyResourceOp(resource=handle)
        with pytest.raises(gradserve.AbortedError):
            taken.result(PATIENCE_SECONDS)


def waiting(client: gradserve.Client, handle: gradserve.AccumulatorHandle) -> int:
    return next(info.num_waiting for info in client.list_accumulators() if info.name == handle.name)


@pytest.mark.parametrize("family", FAMILIES)
def test_ops_take_a_conditional_accumulator(client: gradserve.Client, family: str) -> None:
    acc, ops = client.conditional_accumulator("float32", (1,)), client.raw_ops
    getattr(ops, f"{family}AccumulatorSetGlobalStep")(handle=acc, new_global_step=3)
    getattr(ops, f"{family}AccumulatorApplyGradient")(handle=acc, local_step=3, gradient=np.array([5], np.float32))
    assert getattr(ops, f"{family}AccumulatorNumAccumulated")(handle=acc) == acc.num_accumulated() == 1
    taken = getattr(ops, f"{family}AccumulatorTakeGradient")(handle=acc, num_required=1, dtype="float32")
    assert taken == 5
    assert acc.info().global_step == 4


def test_ops_take_a_sparse_conditional_accumulator(client: gradserve.Client) -> None:
    acc, ops = client.sparse_conditional_accumulator("float32", (4, 1)), client.raw_ops
    sparse_apply(ops, acc, [1, 3], np.array([[1], [2]], np.float32))
    acc.apply_grad([3], [[4]])
    assert ops.AccumulatorNumAccumulated(handle=acc) == 2
    taken = ops.SparseAccumulatorTakeGradient(handle=acc, num_required=2, dtype="float32")
    assert [each.tolist() for each in taken] == [[1, 3], [[1], [3]], [4, 1]]
    ops.DestroyResourceOp(resource=acc)


async def test_ops_take_accumulators_of_asyncio(server_address: str) -> None:
    async with gradserve.aio.connect(server_address, timeout=PATIENCE_SECONDS) as client:
        acc = await client.conditional_accumulator("float32", (1,))
        await client.raw_ops.ResourceAccumulatorApplyGradient(handle=acc, local_step=0, gradient=[2])
        taken = await client.raw_ops.ResourceAccumulatorTakeGradient(handle=acc, num_required=1, dtype="float32")
        assert taken == 2
        rows = await client.sparse_conditional_accumulator("float64")
        assert await client.raw_ops.AccumulatorNumAccumulated(handle=rows.accumulator_ref) == 0


def sparse_apply(
    ops: gradserve.RawOps, handle: Any, indices: Any, values: Any, shape: Any = None, worker_id: str = ""
) -> None:
    ops.SparseAccumulatorApplyGradient(
        handle=handle,
        local_step=0,
        gradient_indices=indices,
        gradient_values=values,
        gradient_shape=() if shape is None else shape,
        has_known_shape=shape is not None,
        worker_id=worker_id,
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_applying_says_nothing(ops: Any, family: str) -> None:
    handle, apply_gradient = dense(ops), getattr(ops, f"{family}AccumulatorApplyGradient")
    assert apply_gradient(handle=handle, local_step=0, gradient=[1.0]) is None
    assert ops.AccumulatorSetGlobalStep(handle=handle, new_global_step=7) is None
    assert apply_gradient(handle=handle, local_step=6, gradient=[1.0]) is None, "stale: dropped in silence"
    count = getattr(ops, f"{family}AccumulatorNumAccumulated")(handle=handle)
    assert (type(count), count) == (np.int32, 1)


def test_every_gradient_of_a_worker_counts(ops: gradserve.RawOps) -> None:
    """As in TensorFlow, which knows nothing of workers."""
    handle = dense(ops)
    apply(ops, handle, 1, 2, 3)
    assert ops.AccumulatorNumAccumulated(handle=handle) == 3
    assert take(ops, handle, 3) == 2


def test_a_worker_that_is_named_counts_as_the_accumulator_says(client: gradserve.Client) -> None:
    ops, dense_acc = client.raw_ops, client.conditional_accumulator("float32", (1,), one_per_worker=True)
    sparse_acc = client.sparse_conditional_accumulator("float32", (1,), one_per_worker=True, deterministic=True)
    for value, worker in ((1, "a"), (2, "a"), (3, "b")):
        ops.AccumulatorApplyGradient(handle=dense_acc, local_step=0, gradient=[value], worker_id=worker)
        sparse_apply(ops, sparse_acc, [0], [value], worker_id=worker)
    for acc in (dense_acc, sparse_acc):
        assert acc.info().worker_ids == ("a", "b")
        assert acc.num_accumulated() == 2
    apply(ops, dense_acc, 4, 5)
    assert dense_acc.num_accumulated() == 4, "those of nobody in particular all count"
    with pytest.raises(gradserve.InvalidArgumentError, match="expected a worker_id"):
        sparse_apply(ops, sparse_acc, [0], [1])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_numbers_become_the_accumulators_dtype(ops: gradserve.RawOps, dtype: str) -> None:
    handle = dense(ops, dtype)
    ops.AccumulatorApplyGradient(handle=handle, local_step=0, gradient=[1, 2.5])
    average = ops.AccumulatorTakeGradient(handle=handle, num_required=1, dtype=dtype)
    assert (str(average.dtype), average.tolist()) == (dtype, [1, 2.5])
    rows = ops.SparseConditionalAccumulator(dtype=dtype, shape=None)
    sparse_apply(ops, rows, [1], [[1, 2.5]])
    outputs = ops.SparseAccumulatorTakeGradient(handle=rows, num_required=1, dtype=dtype)
    assert outputs._fields == ("indices", "values", "shape")
    assert [str(each.dtype) for each in outputs] == ["int64", dtype, "int64"]
    assert [each.tolist() for each in outputs] == [[1], [[1, 2.5]], [-1, 2]]


@pytest.mark.parametrize("step", [1, np.int32(1), np.int64(1), np.array(1), np.uint8(1), True])
def test_scalars_are_whatever_is_an_integer(ops: gradserve.RawOps, step: Any) -> None:
    handle = dense(ops)
    ops.AccumulatorSetGlobalStep(handle=handle, new_global_step=step)
    ops.AccumulatorApplyGradient(handle=handle, local_step=step, gradient=[1.0])
    assert take(ops, handle, step) == 1


@pytest.mark.parametrize("extreme", [-(2**63), 2**63 - 1])
def test_steps_are_int64(client: gradserve.Client, name: str, extreme: int) -> None:
    handle = dense(client.raw_ops, shared_name=name)
    client.raw_ops.AccumulatorSetGlobalStep(handle=handle, new_global_step=extreme)
    assert next(info for info in client.list_accumulators() if info.name == name).global_step == extreme
    client.raw_ops.DestroyResourceOp(resource=handle)


def test_a_gradient_on_the_server_stays_there(client: gradserve.Client) -> None:
    stored, handle = client.put(np.array([3], np.float32)), dense(client.raw_ops)
    client.raw_ops.AccumulatorApplyGradient(handle=handle, local_step=0, gradient=stored)
    assert take(client.raw_ops, handle) == client.get(stored) == 3
    client.delete(stored)


def test_large_gradients(client: gradserve.Client) -> None:
    ops, before = client.raw_ops, client.list_tensors()
    large = np.arange(1 << 20, dtype=np.float32)
    handle, rows = dense(ops), ops.SparseConditionalAccumulator(dtype="float32", shape=None)
    ops.ResourceAccumulatorApplyGradient(handle=handle, local_step=0, gradient=large)
    sparse_apply(ops, rows, np.arange(large.size), large)
    assert np.array_equal(take(ops, handle), large)
    taken = ops.SparseAccumulatorTakeGradient(handle=rows, num_required=1, dtype="float32")
    assert np.array_equal(taken.values, large)
    assert client.list_tensors() == before


def test_a_shape_that_is_not_known_is_not_read(ops: gradserve.RawOps) -> None:
    rows = ops.SparseConditionalAccumulator(dtype="float32", shape=(2, 2))
    values: dict[str, Any] = {"gradient_indices": [0], "gradient_values": [[1, 2]], "gradient_shape": [7]}
    ops.SparseAccumulatorApplyGradient(handle=rows, local_step=0, has_known_shape=False, **values)
    with pytest.raises(gradserve.InvalidArgumentError, match="expected shape rank at least 2, got 1"):
        ops.SparseAccumulatorApplyGradient(handle=rows, local_step=0, has_known_shape=True, **values)


def test_a_take_waits_for_another_client(ops: gradserve.RawOps, client: gradserve.Client, other: Any) -> None:
    handle = dense(ops)
    with ThreadPoolExecutor(1) as threads:
        taken = threads.submit(take, ops, handle, 2, timeout=PATIENCE_SECONDS)
        eventually(lambda: waiting(client, handle) == 1)
        apply(other.raw_ops, handle, 1, 3)
        assert taken.result(PATIENCE_SECONDS) == 2


@pytest.mark.parametrize("op", [name for name in REQUIRED if name.endswith("TakeGradient")])
def test_a_take_gives_up_when_told(server_address: str, op: str) -> None:
    with gradserve.connect(server_address, timeout=PATIENCE_SECONDS) as client:
        ops = client.raw_ops
        make = ops.SparseConditionalAccumulator if op.startswith("Sparse") else ops.ConditionalAccumulator
        handle = make(dtype="float32", shape=None)
        with pytest.raises(gradserve.DeadlineExceededError, match="did not get the 2 gradients required within 0.01 s"):
            getattr(ops, op)(handle=handle, num_required=2, dtype="float32", timeout=0.01)
        assert waiting(client, handle) == 0


def test_a_take_waits_as_long_as_the_client_does(server_address: str) -> None:
    with (
        gradserve.connect(server_address, timeout=PATIENCE_SECONDS) as client,
        gradserve.connect(server_address, timeout=0.5) as impatient,
    ):
        handle = dense(client.raw_ops)
        with pytest.raises(gradserve.DeadlineExceededError, match=r"required within 0\.5 s"):
            take(impatient.raw_ops, handle)


def test_calls_with_a_known_request_id_count_once(ops: gradserve.RawOps) -> None:
    handle = dense(ops)
    for _ in range(2):
        ops.AccumulatorApplyGradient(handle=handle, local_step=0, gradient=[3.0], request_id=1 << 40)
    assert ops.AccumulatorNumAccumulated(handle=handle) == 1
    averages = [take(ops, handle, request_id=(1 << 40) + 1, timeout=PATIENCE_SECONDS) for _ in range(2)]
    assert averages == [3, 3]
    rows = ops.SparseConditionalAccumulator(dtype="float32", shape=None)
    for _ in range(2):
        ops.SparseAccumulatorApplyGradient(
            handle=rows,
            local_step=0,
            gradient_indices=[0],
            gradient_values=[1.0],
            gradient_shape=[],
            has_known_shape=False,
            request_id=1 << 40,
        )
    assert ops.AccumulatorNumAccumulated(handle=rows) == 1
