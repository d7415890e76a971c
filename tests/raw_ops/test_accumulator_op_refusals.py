"""What the ops on accumulators refuse, with TensorFlow's messages, and that it changes nothing."""

from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gradserve
import gradserve.aio
from tests.raw_ops.accumulator_table import CREATING, REQUIRED

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
    with pytest.raises(
        gradserve.InvalidArgumentError, match=rf"expected an AccumulatorHandle, .*{message} \["
    ) as raised:
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
        gradserve.InvalidArgumentError, match=rf"^expected a {wanted} accumulator, got the {given} {name} \["
    ):
        getattr(client.raw_ops, op)(handle=handle, **HANDLE_CALLS[op])


def test_every_op_on_a_handle_is_called_here() -> None:
    assert set(HANDLE_CALLS) == set(REQUIRED) - set(CREATING)
