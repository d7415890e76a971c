"""GRUBlockCell through the client: TensorFlow's names, numbers and refusals."""

import inspect
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gradserve
import gradserve.aio
from gradserve import TensorHandle
from tests.golden.gru_block_cell import (
    ForwardCase,
    GradientCase,
    assert_output,
    assert_outputs,
    load_forward_cases,
    load_gradient_cases,
)
from tests.servers.polling import PATIENCE_SECONDS

pytestmark = pytest.mark.usefixtures("_prepared_ops")

GRADIENT: dict[str, Any] = dict(
    vars(next(case for case in load_gradient_cases() if case.name == "float32-odd-gradient").inputs)
)
CELL: dict[str, Any] = {name: GRADIENT[name] for name in ("x", "h_prev", "w_ru", "w_c", "b_ru", "b_c")}
OPS = {"GRUBlockCell": CELL, "GRUBlockCellGrad": GRADIENT}
OUTPUTS = ("d_x", "d_h_prev", "d_c_bar", "d_r_bar_u_bar")
WEIGHT_GRADIENTS = ("d_w_ru", "d_w_c", "d_b_ru", "d_b_c")


def large() -> dict[str, Any]:
    """Returns inputs of more than what travels inside a message."""
    random = np.random.RandomState(1)
    shapes = {"x": (8, 500), "h_prev": (8, 400), "w_ru": (900, 800), "w_c": (900, 400), "b_ru": (800,), "b_c": (400,)}
    shapes |= dict.fromkeys(("r", "u", "c", "d_h"), (8, 400))
    return {name: random.uniform(-0.5, 0.5, shape).astype(np.float32) for name, shape in shapes.items()}


def equal(ours: Any, theirs: Any) -> bool:
    return all(np.array_equal(one, other) for one, other in zip(ours, theirs, strict=True))


# --- Numbers


@pytest.mark.parametrize("case", load_forward_cases(), ids=str)
def test_cell(client: gradserve.Client, case: ForwardCase) -> None:
    assert_outputs(case, client.raw_ops.GRUBlockCell(**vars(case.inputs))._asdict())


@pytest.mark.parametrize("case", load_gradient_cases(), ids=str)
def test_gradient(client: gradserve.Client, case: GradientCase) -> None:
    outputs = client.raw_ops.GRUBlockCellGrad(**vars(case.inputs), weight_gradients=True)
    assert_outputs(case, outputs._asdict())


def test_outputs_are_named_as_tensorflow_names_them(client: gradserve.Client) -> None:
    assert client.raw_ops.GRUBlockCell(**CELL)._fields == ("r", "u", "c", "h")
    assert client.raw_ops.GRUBlockCellGrad(**GRADIENT)._fields == OUTPUTS


def test_weight_gradients_are_four_more_outputs(client: gradserve.Client) -> None:
    fewer = client.raw_ops.GRUBlockCellGrad(**GRADIENT)
    assert equal(fewer, client.raw_ops.GRUBlockCellGrad(**GRADIENT, weight_gradients=False))
    more = client.raw_ops.GRUBlockCellGrad(**GRADIENT, weight_gradients=True)
    assert more._fields == (*OUTPUTS, *WEIGHT_GRADIENTS)
    assert equal(fewer, more[:4])


def test_a_step_and_its_gradient(client: gradserve.Client) -> None:
    """The gates are not computed anew: with others the gradient is another."""
    forward = client.raw_ops.GRUBlockCell(**CELL)
    gates = {"r": forward.r, "u": forward.u, "c": forward.c}
    own = client.raw_ops.GRUBlockCellGrad(**CELL, **gates, d_h=GRADIENT["d_h"])
    case = next(case for case in load_gradient_cases() if case.name == "float32-odd-gradient")
    for name, output in own._asdict().items():
        assert_output(case, name, output)
    for name in gates:
        other = client.raw_ops.GRUBlockCellGrad(**CELL, **(gates | {name: gates[name] / 2}), d_h=GRADIENT["d_h"])
        assert not equal(own, other), name


# --- What inputs can be


@pytest.mark.parametrize("op", list(OPS))
def test_numbers_become_what_the_op_takes(client: gradserve.Client, op: str) -> None:
    call, arrays = getattr(client.raw_ops, op), OPS[op]
    assert equal(call(**{name: array.tolist() for name, array in arrays.items()}), call(**arrays))
    wide = call(**{name: array.tolist() for name, array in arrays.items()} | {"x": arrays["x"].astype(np.float64)})
    assert {output.dtype for output in wide} == {np.dtype(np.float64)}


@pytest.mark.parametrize("op", list(OPS))
def test_arrays_in_any_layout(client: gradserve.Client, op: str) -> None:
    call, arrays = getattr(client.raw_ops, op), OPS[op]
    turned = {name: np.asfortranarray(array) for name, array in arrays.items()}
    swapped = {name: array.astype(">f4") for name, array in arrays.items()}
    assert equal(call(**turned), call(**arrays))
    assert equal(call(**swapped), call(**arrays))


MIXES = {"all inline": (), "weights": ("w_ru", "w_c"), "state": ("h_prev", "r", "u", "c"), "all": tuple(GRADIENT)}


@pytest.mark.parametrize("arrays", [GRADIENT, large()], ids=["inline", "uploaded"])
@pytest.mark.parametrize("stored", list(MIXES.values()), ids=list(MIXES))
def test_arrays_and_handles_mix(client: gradserve.Client, stored: tuple[str, ...], arrays: dict[str, Any]) -> None:
    expected = client.raw_ops.GRUBlockCellGrad(**arrays, weight_gradients=True)
    before = {each.handle for each in client.list_tensors()}
    handles = {name: client.put(arrays[name]) for name in stored}
    assert equal(client.raw_ops.GRUBlockCellGrad(**{**arrays, **handles}, weight_gradients=True), expected)
    left = {each.handle for each in client.list_tensors()} - before
    assert left == {each.handle for each in handles.values()}
    client.delete(*handles.values())


# --- Outputs that stay


@pytest.mark.parametrize(
    ("op", "options"),
    [("GRUBlockCell", {}), ("GRUBlockCellGrad", {}), ("GRUBlockCellGrad", {"weight_gradients": True})],
)
def test_kept_outputs(client: gradserve.Client, op: str, options: dict[str, bool]) -> None:
    call, arrays = getattr(client.raw_ops, op), OPS[op]
    before = client.list_tensors()
    kept, sent = call(**arrays, **options, keep=True, lease=120), call(**arrays, **options)
    assert type(kept) is type(sent)
    assert all(isinstance(output, TensorHandle) for output in kept)
    assert equal([client.get(handle) for handle in kept], sent)
    assert len(client.list_tensors()) - len(before) == len(kept)
    client.delete(*kept)


def test_steps_in_a_row_by_handle(client: gradserve.Client) -> None:
    """Two steps and back: only what the caller needs travels."""
    weights = {name: client.put(CELL[name]) for name in ("w_ru", "w_c", "b_ru", "b_c")}
    sent_weights = {name: CELL[name] for name in weights}

    def back(weights: dict[str, Any], keep: bool) -> Any:
        ops, x, states, steps = client.raw_ops, CELL["x"], [CELL["h_prev"]], []
        for _ in range(2):
            steps.append(ops.GRUBlockCell(x=x, h_prev=states[-1], **weights, keep=keep))
            states.append(steps[-1].h)
        d_h = GRADIENT["d_h"]
        for step, state in zip(reversed(steps), reversed(states[:-1]), strict=True):
            gates: dict[str, Any] = {"r": step.r, "u": step.u, "c": step.c}
            gradient = ops.GRUBlockCellGrad(x=x, h_prev=state, **weights, **gates, d_h=d_h, keep=keep)
            d_h = gradient.d_h_prev
        return client.get(d_h) if keep else d_h

    assert np.array_equal(back(weights, keep=True), back(sent_weights, keep=False))


def test_a_kept_weight_gradient_is_applied_without_travelling(client: gradserve.Client) -> None:
    kept = client.raw_ops.GRUBlockCellGrad(**GRADIENT, weight_gradients=True, keep=True)
    model = client.gradient_accumulator({"w_ru": kept.d_w_ru, "b_c": kept.d_b_c})
    assert model.apply_grad({"w_ru": kept.d_w_ru, "b_c": kept.d_b_c}).outcome is gradserve.ACCEPTED
    assert np.array_equal(model.take_grad(1)["w_ru"], client.get(kept.d_w_ru))


# --- Refusals

REFUSED: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "integers": ("GRUBlockCell", {"x": CELL["x"].astype(np.int32)}, "x", "'T' of int32 is not in the list"),
    "two dtypes": (
        "GRUBlockCell",
        {"w_c": CELL["w_c"].astype(np.float64)},
        "w_c",
        "expected float32 for w_c, as x is float32; got float64",
    ),
    "bfloat16 alone": (
        "GRUBlockCellGrad",
        {"x": CELL["x"].astype(ml_dtypes.bfloat16)},
        "h_prev",
        "got float",
    ),
    "rank": ("GRUBlockCell", {"w_ru": CELL["b_ru"]}, "w_ru", "Rank of w_ru_ must be 2, got 1"),
    "size": ("GRUBlockCellGrad", {"d_h": GRADIENT["d_h"][1:]}, "d_h", "d_h.dims(0) != batch_size: 6 vs. 7"),
    "words": ("GRUBlockCell", {"b_c": ["a"]}, "b_c", "expected an array or numbers"),
    "negative lease": ("GRUBlockCellGrad", {"keep": True, "lease": -1.0}, "placement.lease", "a positive lease"),
}


@pytest.mark.parametrize(("op", "changes", "field", "message"), list(REFUSED.values()), ids=list(REFUSED))
def test_refusals(client: gradserve.Client, op: str, changes: dict[str, Any], field: str, message: str) -> None:
    before = client.list_tensors()
    with pytest.raises(gradserve.InvalidArgumentError) as raised:
        getattr(client.raw_ops, op)(**{**OPS[op], **changes})
    assert raised.value.field == field
    assert message in raised.value.message
    assert client.list_tensors() == before


def test_a_handle_that_is_gone(client: gradserve.Client) -> None:
    u = client.put(GRADIENT["u"])
    client.delete(u)
    with pytest.raises(gradserve.NotFoundError) as raised:
        client.raw_ops.GRUBlockCellGrad(**{**GRADIENT, "u": u})
    assert raised.value.field == "u.handle"


@pytest.mark.parametrize("op", list(OPS))
def test_all_arguments_are_keywords(op: str) -> None:
    signature = inspect.signature(getattr(gradserve.RawOps, op))
    kinds = {parameter.kind for name, parameter in signature.parameters.items() if name != "self"}
    assert kinds == {inspect.Parameter.KEYWORD_ONLY}


# --- asyncio


@pytest.mark.parametrize("op", list(OPS))
async def test_both_faces_give_the_same(client: gradserve.Client, server_address: str, op: str) -> None:
    async with gradserve.aio.connect(server_address, timeout=PATIENCE_SECONDS) as awaited:
        theirs = await getattr(awaited.raw_ops, op)(**OPS[op])
    ours = getattr(client.raw_ops, op)(**OPS[op])
    assert type(ours) is type(theirs)
    assert equal(ours, theirs)
