"""Values of variables in requests: no socket, no protobuf, on a device with memory of its own."""

from typing import Any

import numpy as np
import pytest

from gradserve_server.errors import InvalidArgumentError, NotFoundError
from gradserve_server.layers.variables import TensorInitializer
from gradserve_server.rpc.batch_norm_layers.codec import open_initializers
from gradserve_server.rpc.batch_norm_layers.service import open_variables
from gradserve_server.tensors.incoming import IncomingTensor, IncomingTensors, Stored
from tests.tensors.test_incoming import ONES, Opening, incoming, inline, malformed


@pytest.fixture
def opening() -> Opening:
    return Opening()


async def is_shared(opening: Opening, stored: Stored) -> bool:
    async with opening.open({"x": stored}, release=True) as opened:
        return not opened.exclusive


def variables(*given: tuple[str, IncomingTensor]) -> tuple[list[str], IncomingTensors]:
    tensors = {f"variables[{index}].tensor": tensor for index, (_, tensor) in enumerate(given)}
    return [name for name, _ in given], incoming(tensors)


async def initial_value(opening: Opening, tensor: IncomingTensor) -> Any:
    given = await open_initializers(opening.opener, {"beta": None}, incoming({"config.tensor": tensor}))
    initializer = given["beta"]
    assert isinstance(initializer, TensorInitializer)
    return initializer.tensor


async def test_variables_are_values_by_name_that_nobody_takes_over(opening: Opening) -> None:
    stored, device = opening.keep(), opening.on_device()
    away = opening.keep(device)
    async with open_variables(
        opening.opener, *variables(("beta", stored), ("gamma", inline(ONES)), ("mean", away))
    ) as values:
        assert values == {"beta": ONES, "gamma": ONES, "mean": device}
    assert opening.device.copied_out == 0
    assert await is_shared(opening, stored)


@pytest.mark.parametrize(
    ("given", "message", "field"),
    [
        ([], "expected at least one variable, got none", "variables"),
        (
            [("beta", malformed("wrong")), ("beta", Stored("", "nowhere"))],
            "expected each variable once, got 'beta' twice",
            "variables[1].name",
        ),
        ([("beta", inline(ONES)), ("gamma", malformed("wrong", ".shape"))], "wrong", "variables[1].tensor.shape"),
    ],
)
async def test_what_is_wrong_with_variables(
    opening: Opening, given: list[tuple[str, IncomingTensor]], message: str, field: str
) -> None:
    with pytest.raises(InvalidArgumentError) as error:
        async with open_variables(opening.opener, *variables(*given)):
            pass
    assert (error.value.message, error.value.field) == (message, field)


async def test_a_variable_that_does_not_exist_comes_before_a_malformed_one(opening: Opening) -> None:
    given = variables(("beta", malformed("wrong")), ("gamma", Stored("", "nowhere")))
    with pytest.raises(NotFoundError) as error:
        async with open_variables(opening.opener, *given):
            pass
    assert error.value.field == "variables[1].tensor.handle"


async def test_an_initial_value_stays_where_it_is_and_is_copied_to_the_host(opening: Opening) -> None:
    stored = opening.keep(opening.on_device())
    assert np.array_equal(await initial_value(opening, stored), ONES)
    assert opening.device.holds(await opening.array_of(stored))
    assert await initial_value(opening, inline(ONES)) is ONES


async def test_an_initial_value_is_not_taken_over(opening: Opening) -> None:
    stored = opening.keep()
    assert await initial_value(opening, stored) is ONES
    assert await is_shared(opening, stored)


async def test_what_is_wrong_with_an_initial_value(opening: Opening) -> None:
    with pytest.raises(InvalidArgumentError, match="too short") as error:
        await initial_value(opening, malformed("too short", ".content"))
    assert error.value.field == "config.tensor.content"
