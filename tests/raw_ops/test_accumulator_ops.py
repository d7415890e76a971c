"""The accumulator ops: TensorFlow's names, arguments, outputs and refusals.

What the ops do is in tests/accumulators/test_scenarios.py.
"""

import inspect
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import FrozenInstanceError
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gradserve
import gradserve.aio
from gradserve import AccumulatorKind
from tests.servers.polling import PATIENCE_SECONDS, eventually

APPLY, TAKE, COUNT, SET_STEP = (
    ("handle", "local_step", "gradient"),
    ("handle", "num_required", "dtype"),
    ("handle",),
    ("handle", "new_global_step"),
)
SPARSE_APPLY = (
    "handle",
    "local_step",
    "gradient_indices",
    "gradient_values",
    "gradient_shape",
    "has_known_shape",
)
REQUIRED: dict[str, tuple[str, ...]] = {
    "ConditionalAccumulator": ("dtype", "shape"),
    "ResourceConditionalAccumulator": ("dtype", "shape"),
    "SparseConditionalAccumulator": ("dtype", "shape"),
    "AccumulatorApplyGradient": APPLY,
    "ResourceAccumulatorApplyGradient": APPLY,
    "SparseAccumulatorApplyGradient": SPARSE_APPLY,
    "AccumulatorTakeGradient": TAKE,
    "ResourceAccumulatorTakeGradient": TAKE,
    "SparseAccumulatorTakeGradient": TAKE,
    "AccumulatorNumAccumulated": COUNT,
    "ResourceAccumulatorNumAccumulated": COUNT,
    "AccumulatorSetGlobalStep": SET_STEP,
    "ResourceAccumulatorSetGlobalStep": SET_STEP,
    "DestroyResourceOp": ("resource",),
}
"""The arguments without a default, as tf.raw_ops has them."""
CREATING = [op for op in REQUIRED if op.endswith("ConditionalAccumulator")]
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


# --- Names


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


# --- Handles


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
    assert len({handle, pickle.loads(pickle.dumps(handle))}) == 1


def test_other_clients_can_use_a_handle(ops: gradserve.RawOps, other: gradserve.Client) -> None:
    handle = dense(ops)
    apply(other.raw_ops, pickle.loads(pickle.dumps(handle)), 1)
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


# --- Accumulators instead of handles


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


# --- Inputs and outputs


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


# --- Waiting, and calls that are made again


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
    with gradserve.connect(server_address, timeout=0.5) as client:
        handle = dense(client.raw_ops)
        with pytest.raises(gradserve.DeadlineExceededError, match=r"required within 0\.5 s"):
            take(client.raw_ops, handle)


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


# --- Refusals

FLOATS = "half, bfloat16, float, double"
SPARSE = {"gradient_indices": [0], "gradient_values": [1.0], "gradient_shape": [1], "has_known_shape": True}
DENSE_APPLY = {"local_step": 0, "gradient": [1.0]}
DENSE_TAKE = {"num_required": 1, "dtype": "float32"}

CREATION_REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "reduction": (
        {"reduction_type": "Invalid"},
        "reduction_type",
        'Value for attr \'reduction_type\' of "Invalid" is not in the list of allowed values: "MEAN", "SUM"',
    ),
    "integers": (
        {"dtype": "int32"},
        "dtype",
        f"Value for attr 'dtype' of int32 is not in the list of allowed values: {FLOATS}",
    ),
    "text": ({"dtype": "text"}, "dtype", "for dtype, got text"),
    "no dtype": ({"dtype": None}, "dtype", "for dtype, got None"),
    "dimension": ({"shape": (-2,)}, "spec.components[0].shape.dims", "expected dimensions of at least -1, got -2"),
}


@pytest.mark.parametrize("op", CREATING)
@pytest.mark.parametrize(("changes", "field", "message"), list(CREATION_REFUSED.values()), ids=list(CREATION_REFUSED))
def test_creations_refused(
    client: gradserve.Client, op: str, changes: dict[str, Any], field: str, message: str
) -> None:
    before = client.list_accumulators()
    with pytest.raises(gradserve.InvalidArgumentError) as raised:
        getattr(client.raw_ops, op)(**{"dtype": "float32", "shape": None, **changes})
    assert raised.value.field == field
    assert message in raised.value.message
    assert client.list_accumulators() == before


def both(op: str, reference: str = "string_ref") -> list[tuple[str, str]]:
    return [(op, reference), (f"Resource{op}", "resource")]


def scalars(
    op: str, arguments: dict[str, Any], name: str, dtype: str
) -> Iterator[tuple[str, dict[str, Any], str, str]]:
    too_large = 2**31 if dtype == "int32" else 2**63
    for value, message in [
        ([1], f"Argument {name} must be scalar, but had bad shape [1]"),
        (np.ones((2, 3), np.int64), f"Argument {name} must be scalar, but had bad shape [2,3]"),
        (np.empty((0,), np.int64), f"Argument {name} must be scalar, but had bad shape [0]"),
        (1.5, f"expected {dtype} values for {name}, got 1.5"),
        ("1", f"expected {dtype} values for {name}, got '1'"),
        (None, f"expected {dtype} values for {name}, got None"),
        (too_large, f"expected {dtype} values for {name}, got {too_large}"),
        (-too_large - 1, f"expected {dtype} values for {name}, got {-too_large - 1}"),
        (1 << 80, f"expected {dtype} values for {name}, got {1 << 80}"),
    ]:
        yield op, {**arguments, name: value}, name, message


DENSE_REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    *(
        (
            op,
            {**DENSE_APPLY, "gradient": np.zeros(1, dtype)},
            "gradient",
            f"Signature mismatch, have: {reference}, int64, {text}-> expected: {reference}, int64, float->",
        )
        for op, reference in both("AccumulatorApplyGradient")
        for dtype, text in [
            (np.float64, "double"),
            (np.float16, "half"),
            (ml_dtypes.bfloat16, "bfloat16"),
            (np.int32, "int32"),
        ]
    ),
    *(
        (
            op,
            {**DENSE_TAKE, "dtype": "float64"},
            "dtype",
            f"Signature mismatch, have: {reference}, int32->double expected: {reference}, int32->float",
        )
        for op, reference in both("AccumulatorTakeGradient")
    ),
    *(
        case
        for op, _ in both("AccumulatorApplyGradient")
        for case in [
            *scalars(op, DENSE_APPLY, "local_step", "int64"),
            (op, {**DENSE_APPLY, "gradient": ["a"]}, "gradient", "expected an array or numbers"),
            (op, {**DENSE_APPLY, "gradient": [[1], [2, 3]]}, "gradient", "expected an array or numbers"),
            (
                op,
                {**DENSE_APPLY, "gradient": [1, 2]},
                "gradient[0].dense.shape",
                "Shape mismatch: expected [1], got [2]",
            ),
        ]
    ),
    *(
        case
        for op, _ in both("AccumulatorTakeGradient")
        for case in [
            *scalars(op, DENSE_TAKE, "num_required", "int32"),
            *(
                (op, {**DENSE_TAKE, "num_required": number}, "num_required", f"must be positive, but was {number}")
                for number in (0, -1, -(2**31))
            ),
            (op, {**DENSE_TAKE, "dtype": None}, "dtype", "for dtype, got None"),
            (op, {**DENSE_TAKE, "dtype": "text"}, "dtype", "for dtype, got text"),
            (op, {**DENSE_TAKE, "timeout": -1}, "timeout", "of at least 0 s, math.inf for no limit, got -1"),
        ]
    ),
    *(
        case
        for op, _ in both("AccumulatorSetGlobalStep")
        for case in scalars(op, {"new_global_step": 0}, "new_global_step", "int64")
    ),
]


@pytest.mark.parametrize(("op", "arguments", "field", "message"), DENSE_REFUSED)
def test_refusals(client: gradserve.Client, op: str, arguments: dict[str, Any], field: str, message: str) -> None:
    acc = client.conditional_accumulator("float32", (1,))
    acc.apply_grad([1.0])
    check_refusal(client, op, acc, arguments, field, message)


SPARSE_REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    (
        "SparseAccumulatorApplyGradient",
        {"gradient_values": np.zeros(1)},
        "gradient_values",
        "Signature mismatch, have: string_ref, int64, int64, double, int64-> "
        "expected: string_ref, int64, int64, float, int64->",
    ),
    (
        "SparseAccumulatorTakeGradient",
        {"dtype": "float16"},
        "dtype",
        "Signature mismatch, have: string_ref, int32->int64, half, int64 "
        "expected: string_ref, int32->int64, float, int64",
    ),
    *(
        ("SparseAccumulatorApplyGradient", {name: value}, name, message)
        for name, value, message in [
            ("gradient_indices", [0.5], "expected int64 values for gradient_indices, got [0.5]"),
            ("gradient_indices", [[0], [1, 2]], "expected int64 values for gradient_indices"),
            ("gradient_indices", [2**63], "expected int64 values for gradient_indices"),
            ("gradient_indices", [[0]], "Input indices should be vector but received shape: [1,1]"),
            ("gradient_indices", [3], "index of slice 0 exceeded limits of shape; index is 3 exceeded 1"),
            ("gradient_values", 1.0, "Values cannot be 0-dimensional."),
            ("gradient_values", [1.0, 2.0], "Expected 1 non-empty input values, got 2"),
            ("gradient_values", ["a"], "expected an array or numbers"),
            ("gradient_shape", [1.5], "expected int64 values for gradient_shape, got [1.5]"),
            ("gradient_shape", [2], "expected shape dim 0 to be 1, got 2"),
            ("gradient_shape", [], "expected shape rank at least 1, got 0"),
            ("has_known_shape", 1, "Expected bool for argument 'has_known_shape' not 1."),
        ]
    ),
    *scalars("SparseAccumulatorApplyGradient", {}, "local_step", "int64"),
    *scalars("SparseAccumulatorTakeGradient", {}, "num_required", "int32"),
]


@pytest.mark.parametrize(("op", "changes", "field", "message"), SPARSE_REFUSED)
def test_sparse_refusals(client: gradserve.Client, op: str, changes: dict[str, Any], field: str, message: str) -> None:
    acc = client.sparse_conditional_accumulator("float32", (1,))
    acc.apply_grad([0], [1.0])
    arguments = DENSE_TAKE if op == "SparseAccumulatorTakeGradient" else {"local_step": 0, **SPARSE}
    check_refusal(client, op, acc, {**arguments, **changes}, field, message)


def test_sparse_gradients_are_not_handles(client: gradserve.Client) -> None:
    stored = client.put(np.array([1], np.float32))
    acc = client.sparse_conditional_accumulator("float32", (1,))
    acc.apply_grad([0], [1.0])
    arguments = {"local_step": 0, **SPARSE, "gradient_values": stored}
    check_refusal(
        client,
        "SparseAccumulatorApplyGradient",
        acc,
        arguments,
        "gradient_values",
        "expected an array for gradient_values",
    )
    client.delete(stored)


def check_refusal(
    client: gradserve.Client, op: str, acc: Any, arguments: dict[str, Any], field: str, message: str
) -> None:
    """Asserts an error, and that the accumulator is as it was: one gradient, step 0."""
    before = client.list_tensors()
    with pytest.raises(gradserve.InvalidArgumentError) as raised:
        getattr(client.raw_ops, op)(handle=acc, **arguments)
    assert message in raised.value.message
    assert raised.value.field == field
    info = acc.info()
    assert (info.num_accumulated, info.global_step, info.num_waiting) == (1, 0, 0)
    assert client.list_tensors() == before


WRONG_HANDLES: dict[str, tuple[Callable[[gradserve.Client], Any], str]] = {
    "None": (lambda _: None, "got NoneType"),
    "text": (lambda _: "w", "got str"),
    "a tensor": (lambda client: client.put([1.0]), "got TensorHandle"),
    "a model's": (lambda client: client.gradient_accumulator({"w": [1.0]}), "got GradientAccumulator"),
}
HANDLE_CALLS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("AccumulatorApplyGradient", "ResourceAccumulatorApplyGradient"), DENSE_APPLY),
    "SparseAccumulatorApplyGradient": {"local_step": 0, **SPARSE},
    **{op: DENSE_TAKE for op in REQUIRED if op.endswith("TakeGradient")},
    **{op: {} for op in REQUIRED if op.endswith("NumAccumulated")},
    **{op: {"new_global_step": 0} for op in REQUIRED if op.endswith("SetGlobalStep")},
    "DestroyResourceOp": {},
}


@pytest.mark.parametrize("op", list(HANDLE_CALLS))
@pytest.mark.parametrize(("make", "message"), list(WRONG_HANDLES.values()), ids=list(WRONG_HANDLES))
def test_what_is_not_a_handle(
    client: gradserve.Client, op: str, make: Callable[[gradserve.Client], Any], message: str
) -> None:
    name = "resource" if op == "DestroyResourceOp" else "handle"
    with pytest.raises(gradserve.InvalidArgumentError, match=f"expected an AccumulatorHandle, .*{message}$") as raised:
        getattr(client.raw_ops, op)(**{name: make(client), **HANDLE_CALLS[op]})
    assert raised.value.field == name


@pytest.mark.parametrize("op", [op for op in HANDLE_CALLS if op.endswith(("ApplyGradient", "TakeGradient"))])
def test_a_handle_of_the_other_kind(client: gradserve.Client, op: str) -> None:
    sparse = client.sparse_conditional_accumulator("float32", (1,))
    wanted, given, handle = "dense", "sparse", sparse.accumulator_ref
    if op.startswith("Sparse"):
        wanted, given, handle = "sparse", "dense", client.conditional_accumulator("float32").accumulator_ref
    name = f"'{handle.container}/{handle.name}'"
    with pytest.raises(
        gradserve.InvalidArgumentError, match=f"^expected a {wanted} accumulator, got the {given} {name}$"
    ):
        getattr(client.raw_ops, op)(handle=handle, **HANDLE_CALLS[op])


def test_every_op_on_a_handle_is_called_here() -> None:
    assert set(HANDLE_CALLS) == set(REQUIRED) - set(CREATING)
