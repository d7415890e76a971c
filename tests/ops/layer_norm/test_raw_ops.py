"""LayerNorm through the client: PyTorch's numbers, by value and by handle."""

from typing import Any

import numpy as np
import pytest

import gradserve
import gradserve.aio
from tests.golden.layer_norm import Case, assert_outputs, load_cases

pytestmark = pytest.mark.usefixtures("_prepared_ops")

by_case = pytest.mark.parametrize("case", load_cases(), ids=str)
CASE = next(case for case in load_cases() if case.dtype == "float32" and case.inputs.x.size)


def arguments(case: Case) -> dict[str, Any]:
    return {**vars(case.inputs), "epsilon": case.attributes.epsilon}


@by_case
def test_forward(client: gradserve.Client, case: Case) -> None:
    assert_outputs(case, client.raw_ops.LayerNorm(**arguments(case))._asdict())


@by_case
def test_gradient(client: gradserve.Client, case: Case) -> None:
    assert_outputs(case, client.raw_ops.LayerNormGrad(**vars(case.grad_inputs))._asdict())


def test_a_forward_and_its_gradient_by_handle(client: gradserve.Client) -> None:
    forward = client.raw_ops.LayerNorm(**arguments(CASE), keep=True)
    gradient = client.raw_ops.LayerNormGrad(
        y_backprop=CASE.grad_inputs.y_backprop,
        x=CASE.inputs.x,
        scale=CASE.inputs.scale,
        mean=forward.mean,
        rstd=forward.rstd,
        keep=True,
    )
    assert_outputs(CASE, dict(zip(forward._fields, client.get_all(list(forward)), strict=True)))
    assert_outputs(CASE, dict(zip(gradient._fields, client.get_all(list(gradient)), strict=True)))
    client.delete(*forward, *gradient)


async def test_asyncio(server_address: str) -> None:
    async with gradserve.aio.connect(server_address) as client:
        assert_outputs(CASE, (await client.raw_ops.LayerNorm(**arguments(CASE)))._asdict())


def test_plain_numbers_and_the_default_epsilon(client: gradserve.Client) -> None:
    """They become float32; the default is PyTorch's."""
    outputs = client.raw_ops.LayerNorm(x=[[1, 3]], scale=[1, 1], offset=[0, 10])
    rstd = 1 / np.sqrt(1 + 1e-5)
    np.testing.assert_allclose(outputs.y, [[-rstd, 10 + rstd]], rtol=1e-6)
    np.testing.assert_allclose(outputs.rstd, [rstd], rtol=1e-6)
    assert all(output.dtype == np.float32 for output in outputs)


def test_parameters_of_float64_images_become_float64(client: gradserve.Client) -> None:
    outputs = client.raw_ops.LayerNorm(x=np.ones((2, 3)), scale=[1, 1, 1], offset=[0, 0, 0])
    assert all(output.dtype == np.float64 for output in outputs)


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"scale": np.ones(2, np.float32)}, "scale"),
        ({"offset": np.ones(2, np.float32)}, "offset"),
        ({"epsilon": -1.0}, "epsilon"),
        ({"x": ["a"]}, "x"),
    ],
)
def test_refusals_name_the_argument(client: gradserve.Client, wrong: dict[str, Any], field: str) -> None:
    good = {"x": np.ones((2, 3), np.float32), "scale": np.ones(3, np.float32), "offset": np.ones(3, np.float32)}
    with pytest.raises(gradserve.InvalidArgumentError) as raised:
        client.raw_ops.LayerNorm(**{**good, **wrong})
    assert raised.value.field == field
