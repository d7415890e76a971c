"""Gradients of requests: no socket, no protobuf, on a server whose ops run on a device with memory of its own."""

import weakref
from functools import partial
from typing import Any

import numpy as np
import pytest

from gradserve_server.accumulators.gradient import Contribution, Gradient, OpenGradient, SparseSlices
from gradserve_server.accumulators.incoming import GradientReceiver
from gradserve_server.accumulators.spec import AccumulatorSpec, ComponentSpec, Layout, PartialShape
from gradserve_server.devices.compute import InlineCompute
from gradserve_server.devices.host.kernels import ForkJoin
from gradserve_server.devices.host.reduction import Reducer
from gradserve_server.errors import InvalidArgumentError, NotFoundError, ServiceError
from gradserve_server.tensors.incoming import Stored
from tests.accumulators.bench import F32, Bench, take, value_of
from tests.accumulators.gradients import Values, gradient_of
from tests.tensors.test_incoming import ONES, Opening, inline, malformed

MODEL = AccumulatorSpec((ComponentSpec("w", F32), ComponentSpec("e", F32, layout=Layout.SPARSE)))
ONE = AccumulatorSpec((ComponentSpec("", F32),))
W = inline(ONES)
E = (inline(np.array([0], np.int64)), inline(np.ones((1, 2), F32)))


def given(opening: Opening, spec: AccumulatorSpec, release: bool = False, **values: Values) -> OpenGradient:
    if len(spec.components) == 1:
        values = {"": next(iter(values.values()))}
    receiver = GradientReceiver(opening.opener, InlineCompute(), Reducer(ForkJoin(1)))
    return partial(receiver.open, spec, Bench().places.host, gradient_of(values, release=release))


async def noted(gradient: Gradient) -> Gradient:
    return gradient


@pytest.fixture
def opening() -> Opening:
    return Opening()


async def test_components_in_any_order(opening: Opening) -> None:
    gradient = await given(opening, MODEL, e=E, w=W)(noted)
    assert list(gradient.values) == ["e", "w"]
    assert gradient.values["w"] is ONES
    assert isinstance(gradient.values["e"], SparseSlices)
    assert not gradient.owned


@pytest.mark.parametrize(
    ("values", "message", "field"),
    [
        ({"w": W}, "expected every component, got none for ['e']", "gradient"),
        ({"w": W, "x": E}, "expected components ['e', 'w'], got 'x'", "gradient[1].name"),
        ({"w": W, "e": None}, "expected a sparse value for component 'e', got none", "gradient[1]"),
        ({"w": E, "e": E}, "expected a dense value for component 'w', got sparse", "gradient[0]"),
        (
            {"w": malformed("too short", ".content"), "x": E},
            "component 'w': too short",
            "gradient[0].dense.content",
        ),
        (
            {"e": (inline(ONES), malformed("too short")), "w": None},
            "component 'e': too short",
            "gradient[0].sparse.values",
        ),
        (
            {"w": inline(np.ones(3)), "e": None},
            "component 'w': expected dtype float32, got float64",
            "gradient[0].dense.dtype",
        ),
    ],
)
async def test_what_is_wrong_is_said_in_the_order_of_the_request(
    opening: Opening, values: Any, message: str, field: str
) -> None:
    with pytest.raises(InvalidArgumentError) as error:
        await given(opening, MODEL, **values)(noted)
    assert (error.value.message, error.value.field) == (message, field)


async def test_tensors_are_forgotten_after_their_use(opening: Opening) -> None:
    array = np.ones(3, F32)
    kept = weakref.ref(array)
    opened = given(opening, ONE, x=inline(array))
    del array
    await opened(noted)
    assert kept() is None, "a push_pull waits for others with this"


async def test_handles_are_looked_up_first(opening: Opening) -> None:
    with pytest.raises(NotFoundError) as error:
        await given(opening, MODEL, x=None, e=(Stored("", "nowhere"), malformed("wrong")))(noted)
    assert error.value.field == "gradient[1].sparse.indices.handle"
    assert error.value.message == "component 'e': no tensor with the handle 'nowhere'"


async def test_what_lies_on_the_device_is_added_up_on_the_host(opening: Opening) -> None:
    bench = Bench()
    acc = bench.accumulator()
    stored = opening.keep(opening.on_device())
    for _ in range(2):
        await acc.apply(None, Contribution(), given(opening, ONE, x=stored))
    assert value_of((await take(acc, 2))[0]) == [1, 1, 1]
    assert opening.device.copied_out == ONES.nbytes, "the second time it was there"


async def test_a_released_result_of_the_device_becomes_the_sum(opening: Opening) -> None:
    acc = Bench(memory=opening.world.memory).accumulator()
    stored = opening.keep(opening.on_device(), shared=True)
    brought = (await given(opening, ONE, x=stored)(noted)).values[""]
    await acc.apply(None, Contribution(), given(opening, ONE, release=True, x=stored))
    assert (await take(acc, 1))[0].values[""] is brought
    assert opening.world.used == (ONES.nbytes, 0), "the average that is kept"


async def test_the_round_names_the_field_of_the_request(opening: Opening) -> None:
    acc = Bench().accumulator(ComponentSpec("only", F32, PartialShape((2,))))
    stored = opening.keep()
    with pytest.raises(ServiceError, match="Shape mismatch") as error:
        await acc.apply(None, Contribution(), given(opening, acc.spec, release=True, x=stored))
    assert error.value.field == "gradient[0].dense.shape"
    assert await opening.array_of(stored) is ONES, "it is there again"
