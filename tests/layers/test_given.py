"""Values of variables in requests: no socket, no protobuf, on a device with memory of its own."""

import numpy as np
import pytest

from gradserve_server.errors import InvalidArgumentError, NotFoundError
from gradserve_server.rpc.batch_norm_layers.codec import GivenVariable, open_initializer
from gradserve_server.rpc.batch_norm_layers.service import open_variables
from gradserve_server.tensors.references import Inline, Malformed, Reference, Stored
from tests.tensors.test_references import ONES, Opening


@pytest.fixture
def opening() -> Opening:
    return Opening()


def is_shared(opening: Opening, stored: Stored) -> bool:
    with opening.open({"x": stored}, release=True) as opened:
        return not opened.exclusive


def test_variables_are_values_by_name_that_nobody_takes_over(opening: Opening) -> None:
    stored, device = opening.keep(), opening.on_device()
    away = opening.keep(device)
    given = [GivenVariable("beta", stored), GivenVariable("gamma", Inline(ONES)), GivenVariable("mean", away)]
    with open_variables(opening.opener, given) as values:
        assert values == {"beta": ONES, "gamma": ONES, "mean": device}
    assert opening.device.copied_out == 0
    assert is_shared(opening, stored)


@pytest.mark.parametrize(
    ("given", "message", "field"),
    [
        ([], "expected at least one variable, got none", "variables"),
        (
            [("beta", Malformed("wrong")), ("beta", Stored("nowhere"))],
            "expected each variable once, got 'beta' twice",
            "variables[1].name",
        ),
        ([("beta", Inline(ONES)), ("gamma", Malformed("wrong", ".shape"))], "wrong", "variables[1].tensor.shape"),
    ],
)
def test_what_is_wrong_with_variables(
    opening: Opening, given: list[tuple[str, Reference]], message: str, field: str
) -> None:
    variables = [GivenVariable(name, tensor) for name, tensor in given]
    with pytest.raises(InvalidArgumentError) as error, open_variables(opening.opener, variables):
        pass
    assert (error.value.message, error.value.field) == (message, field)


def test_a_variable_that_does_not_exist_comes_before_a_malformed_one(opening: Opening) -> None:
    variables = [GivenVariable("beta", Malformed("wrong")), GivenVariable("gamma", Stored("nowhere"))]
    with pytest.raises(NotFoundError) as error, open_variables(opening.opener, variables):
        pass
    assert error.value.field == "variables[1].tensor.handle"


async def test_an_initial_value_stays_where_it_is_and_is_copied_to_the_host(opening: Opening) -> None:
    stored = opening.keep(opening.on_device())
    initializer = await open_initializer(opening.opener, stored, "config.tensor")
    assert np.array_equal(initializer.tensor, ONES)
    assert opening.device.holds(opening.array_of(stored))
    assert (await open_initializer(opening.opener, Inline(ONES), "config.tensor")).tensor is ONES


async def test_an_initial_value_is_not_taken_over(opening: Opening) -> None:
    stored = opening.keep()
    assert (await open_initializer(opening.opener, stored, "config.tensor")).tensor is ONES
    assert is_shared(opening, stored)


async def test_what_is_wrong_with_an_initial_value(opening: Opening) -> None:
    with pytest.raises(InvalidArgumentError, match="too short") as error:
        await open_initializer(opening.opener, Malformed("too short", ".content"), "config.tensor")
    assert error.value.field == "config.tensor.content"
