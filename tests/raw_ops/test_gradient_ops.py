"""Gradient ops through the client: TensorFlow's names, numbers and refusals."""

import inspect
from collections.abc import Callable
from operator import methodcaller
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gradserve
import gradserve.aio
from gradserve import TensorHandle
from tests.golden.fused_batch_norm import (
    ForwardCase,
    GradientCase,
    assert_output,
    assert_outputs,
    load_forward_cases,
    load_gradient_cases,
    load_output_names,
)
from tests.servers.polling import PATIENCE_SECONDS

pytestmark = pytest.mark.usefixtures("_prepared_ops")

X = np.random.RandomState(0).standard_normal((4, 5, 6, 3)).astype(np.float32)
CHANNELS = np.array([1.0, 2.0, 3.0], np.float32)
NONE = np.zeros(0, np.float32)
FORWARD: dict[str, Any] = {"x": X, "scale": CHANNELS, "offset": CHANNELS, "mean": NONE, "variance": NONE}
GRADIENT: dict[str, Any] = {
    "y_backprop": X[::-1].copy(),
    "x": X,
    "scale": CHANNELS,
    "reserve_space_1": CHANNELS,
    "reserve_space_2": CHANNELS,
}
LARGE = np.random.RandomState(1).standard_normal((16, 40, 40, 64)).astype(np.float32)
"""Of more than what travels inside a message."""

FORWARD_OPS = ("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3")
GRADIENT_OPS = ("FusedBatchNormGrad", "FusedBatchNormGradV2", "FusedBatchNormGradV3")


def arguments(case: ForwardCase | GradientCase) -> dict[str, Any]:
    return {**vars(case.inputs), **vars(case.attributes)}


def equal(ours: Any, theirs: Any) -> bool:
    return all(np.array_equal(one, other) for one, other in zip(ours, theirs, strict=True))


# --- Numbers


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("case", load_forward_cases(), ids=str)
def test_forward(client: gradserve.Client, case: ForwardCase) -> None:
    assert_outputs(case, client.raw_ops.FusedBatchNormV3(**arguments(case))._asdict())


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("case", load_gradient_cases(), ids=str)
def test_gradient(client: gradserve.Client, case: GradientCase) -> None:
    assert_outputs(case, client.raw_ops.FusedBatchNormGradV3(**arguments(case))._asdict())


@pytest.mark.parametrize("op", [*FORWARD_OPS, *GRADIENT_OPS])
def test_outputs_are_named_as_tensorflow_names_them(client: gradserve.Client, op: str) -> None:
    outputs = getattr(client.raw_ops, op)(**(FORWARD if op in FORWARD_OPS else GRADIENT))
    assert outputs._fields == tuple(load_output_names()[op])


@pytest.mark.parametrize("op", FORWARD_OPS)
def test_defaults_of_the_forward_op(client: gradserve.Client, op: str) -> None:
    spelled_out = {"epsilon": 0.0001, "exponential_avg_factor": 1, "data_format": "NHWC", "is_training": True}
    call = getattr(client.raw_ops, op)
    assert equal(call(**FORWARD), call(**FORWARD, **spelled_out))


@pytest.mark.parametrize("op", GRADIENT_OPS)
def test_defaults_of_the_gradient_op(client: gradserve.Client, op: str) -> None:
    call = getattr(client.raw_ops, op)
    assert equal(call(**GRADIENT), call(**GRADIENT, epsilon=0.0001, data_format="NHWC", is_training=True))


@pytest.mark.parametrize("op", [*FORWARD_OPS, *GRADIENT_OPS])
def test_every_attribute_counts(client: gradserve.Client, op: str) -> None:
    arrays = FORWARD | {"mean": CHANNELS, "variance": CHANNELS} if op in FORWARD_OPS else GRADIENT
    others: dict[str, Any] = {"epsilon": 0.1, "is_training": False, "data_format": "NCHW"}
    if op in FORWARD_OPS:
        others["exponential_avg_factor"] = 0.5
    call = getattr(client.raw_ops, op)
    square = {name: array[:3, :3] if array.ndim == 4 else array for name, array in arrays.items()}
    for name, value in others.items():
        assert not equal(call(**square), call(**square, **{name: value})), name


@pytest.mark.parametrize("ops", [FORWARD_OPS, GRADIENT_OPS], ids=["forward", "gradient"])
def test_older_versions_are_views_of_the_newest(client: gradserve.Client, ops: tuple[str, ...]) -> None:
    arrays = FORWARD if ops == FORWARD_OPS else GRADIENT
    oldest, older, newest = (getattr(client.raw_ops, op)(**arrays) for op in ops)
    assert equal(oldest, older)
    assert equal(older, newest[: len(older)])


# --- What inputs can be


def test_numbers_become_what_the_op_takes(client: gradserve.Client) -> None:
    lists = client.raw_ops.FusedBatchNormV3(x=X.tolist(), scale=[1, 2, 3], offset=(1.0, 2.0, 3.0), mean=[], variance=[])
    assert equal(lists, client.raw_ops.FusedBatchNormV3(**FORWARD))
    wide = client.raw_ops.FusedBatchNormV3(
        x=X.astype(np.float64), scale=[1, 2, 3], offset=[0] * 3, mean=[], variance=[]
    )
    assert {output.dtype for output in wide} == {np.dtype(np.float64)}


def test_arrays_in_any_layout(client: gradserve.Client) -> None:
    turned = np.asfortranarray(X)
    swapped = X.astype(">f4")
    for x in (turned, swapped):
        assert equal(client.raw_ops.FusedBatchNormV3(**{**FORWARD, "x": x}), client.raw_ops.FusedBatchNormV3(**FORWARD))


MIXES = {
    "all inline": (),
    "x": ("x",),
    "all but x": ("y_backprop", "scale", "reserve_space_1", "reserve_space_2"),
    "all": tuple(GRADIENT),
}


@pytest.mark.parametrize("large", [False, True], ids=["inline", "uploaded"])
@pytest.mark.parametrize("stored", list(MIXES.values()), ids=list(MIXES))
def test_arrays_and_handles_mix(client: gradserve.Client, stored: tuple[str, ...], large: bool) -> None:
    arrays = GRADIENT
    if large:
        channels = np.ones(LARGE.shape[-1], np.float32)
        arrays = {name: LARGE if array.ndim == 4 else channels for name, array in GRADIENT.items()}
    expected = client.raw_ops.FusedBatchNormGradV3(**arrays)
    before = client.list_tensors()
    handles = {name: client.put(arrays[name]) for name in stored}
    assert equal(client.raw_ops.FusedBatchNormGradV3(**{**arrays, **handles}), expected)
    left = client.list_tensors()
    assert {each.handle for each in left} - {each.handle for each in before} == {
        each.handle for each in handles.values()
    }
    client.delete(*handles.values())


def test_one_handle_as_several_inputs(client: gradserve.Client) -> None:
    x, channels = client.put(X), client.put(CHANNELS)
    moments: dict[str, Any] = {"reserve_space_1": channels, "reserve_space_2": channels}
    result = client.raw_ops.FusedBatchNormGradV3(y_backprop=x, x=x, scale=channels, **moments)
    assert equal(result, client.raw_ops.FusedBatchNormGradV3(**{**GRADIENT, "y_backprop": X}))


# --- Outputs that stay


@pytest.mark.parametrize("op", [*FORWARD_OPS, *GRADIENT_OPS])
def test_kept_outputs(client: gradserve.Client, op: str) -> None:
    call, arrays = getattr(client.raw_ops, op), FORWARD if op in FORWARD_OPS else GRADIENT
    before = client.list_tensors()
    kept, sent = call(**arrays, keep=True, lease=120), call(**arrays)
    assert all(isinstance(output, TensorHandle) for output in kept)
    assert equal([client.get(handle) for handle in kept], sent)
    assert len(client.list_tensors()) - len(before) == len(kept), "outputs that the op does not have are not kept"
    client.delete(*kept)


def test_backward_by_handle(client: gradserve.Client) -> None:
    x = client.put(X)
    forward = client.raw_ops.FusedBatchNormV3(**{**FORWARD, "x": x}, keep=True)
    reserved = {name: getattr(forward, name) for name in ("reserve_space_1", "reserve_space_2", "reserve_space_3")}
    chained = client.raw_ops.FusedBatchNormGradV3(y_backprop=forward.y, x=x, scale=CHANNELS, **reserved)
    sent = client.raw_ops.FusedBatchNormV3(**FORWARD)
    moments = {"reserve_space_1": sent.reserve_space_1, "reserve_space_2": sent.reserve_space_2}
    assert equal(chained, client.raw_ops.FusedBatchNormGradV3(y_backprop=sent.y, x=X, scale=CHANNELS, **moments))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_kept_gradient_is_applied_without_travelling(client: gradserve.Client, dtype: str) -> None:
    x = X.astype(ml_dtypes.bfloat16) if dtype == "bfloat16" else X
    arrays = {**GRADIENT, "x": x, "y_backprop": x}
    kept = client.raw_ops.FusedBatchNormGradV3(**arrays, keep=True)
    sent = client.raw_ops.FusedBatchNormGradV3(**arrays)
    model = client.gradient_accumulator({"x": kept.x_backprop, "large": LARGE, "scale": sent.scale_backprop})
    result = model.apply_grad({"x": kept.x_backprop, "large": LARGE, "scale": kept.scale_backprop})
    assert result.outcome is gradserve.ACCEPTED
    average = model.take_grad(1)
    assert np.array_equal(average["x"], sent.x_backprop)
    assert np.array_equal(average["large"], LARGE)
    assert np.array_equal(client.get(kept.x_backprop), sent.x_backprop), "a handle of the caller's stays"
    assert {each.handle for each in client.list_tensors()} >= {kept.x_backprop.handle, kept.scale_backprop.handle}


# --- Refusals

REFUSED: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "V1, half": (
        "FusedBatchNorm",
        {"x": X.astype(np.float16)},
        "x",
        "'T' of half is not in the list of allowed values: float",
    ),
    "V1, double": ("FusedBatchNorm", {"x": X.astype(np.float64)}, "x", "'T' of double"),
    "V1 gradient, bfloat16": ("FusedBatchNormGrad", {"x": X.astype(ml_dtypes.bfloat16)}, "x", "'T' of bfloat16"),
    **{
        f"{op}, {data_format}": (op, {"data_format": data_format}, "data_format", 'allowed values: "NHWC", "NCHW"')
        for op in ("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormGrad", "FusedBatchNormGradV2")
        for data_format in ("NDHWC", "NCDHW", "CHWN", "")
    },
    "V3, CHWN": ("FusedBatchNormV3", {"data_format": "CHWN"}, "data_format", '"NHWC", "NCHW", "NDHWC", "NCDHW"'),
    "no numbers": ("FusedBatchNormV3", {"x": np.array(["a"])}, "x", "expected a dtype out of"),
    "words": ("FusedBatchNormV3", {"x": ["a"]}, "x", "expected an array or numbers"),
    "ragged lists": ("FusedBatchNormGradV3", {"scale": [[1], [2, 3]]}, "scale", "expected an array or numbers"),
    "double scale": (
        "FusedBatchNormV3",
        {"scale": CHANNELS.astype(np.float64)},
        "scale",
        "expected float32 for scale, as x is float32; got float64",
    ),
    "endless lease": ("FusedBatchNormV3", {"keep": True, "lease": float("inf")}, "lease", "a finite lease"),
    "negative lease": ("FusedBatchNormGradV3", {"keep": True, "lease": -1.0}, "placement.lease", "a positive lease"),
}


@pytest.mark.parametrize(("op", "changes", "field", "message"), list(REFUSED.values()), ids=list(REFUSED))
def test_refusals(client: gradserve.Client, op: str, changes: dict[str, Any], field: str, message: str) -> None:
    before = client.list_tensors()
    with pytest.raises(gradserve.InvalidArgumentError) as raised:
        getattr(client.raw_ops, op)(**{**(FORWARD if op in FORWARD_OPS else GRADIENT), **changes})
    assert raised.value.field == field
    assert message in raised.value.message
    assert client.list_tensors() == before


def test_what_was_uploaded_for_a_refused_call_goes(client: gradserve.Client) -> None:
    before = client.list_tensors()
    with pytest.raises(gradserve.InvalidArgumentError, match="scale must have the same number of elements"):
        client.raw_ops.FusedBatchNormV3(**{**FORWARD, "x": LARGE})
    assert client.list_tensors() == before


def test_a_handle_that_is_gone(client: gradserve.Client) -> None:
    x = client.put(X)
    client.delete(x)
    with pytest.raises(gradserve.NotFoundError) as raised:
        client.raw_ops.FusedBatchNormV3(**{**FORWARD, "x": x})
    assert raised.value.field == "x.handle"


@pytest.mark.parametrize("op", [*FORWARD_OPS, *GRADIENT_OPS])
def test_all_arguments_are_keywords(op: str) -> None:
    signature = inspect.signature(getattr(gradserve.RawOps, op))
    kinds = {parameter.kind for name, parameter in signature.parameters.items() if name != "self"}
    assert kinds == {inspect.Parameter.KEYWORD_ONLY}


# --- asyncio


CALLS: dict[str, Callable[[Any], Any]] = {
    **{op: methodcaller(op, **FORWARD) for op in FORWARD_OPS},
    **{op: methodcaller(op, **GRADIENT) for op in GRADIENT_OPS},
}


@pytest.mark.parametrize("op", list(CALLS))
async def test_both_faces_give_the_same(client: gradserve.Client, server_address: str, op: str) -> None:
    async with gradserve.aio.connect(server_address, timeout=PATIENCE_SECONDS) as awaited:
        assert equal(await CALLS[op](awaited.raw_ops), CALLS[op](client.raw_ops))


def test_every_version_is_called_here() -> None:
    assert {name for name in vars(gradserve.RawOps) if name.startswith("FusedBatchNorm")} == set(CALLS)


def test_the_last_output_is_checked_too(client: gradserve.Client) -> None:
    """The tables above compare every output, and would see a wrong one."""
    case = next(case for case in load_forward_cases() if case.inputs.x.size)
    output = client.raw_ops.FusedBatchNormV3(**arguments(case)).reserve_space_3
    assert_output(case, "reserve_space_3", output)
    with pytest.raises(AssertionError):
        assert_output(case, "reserve_space_3", output + 1)
