"""Gradients that are checked while they arrive: which parts are looked at, and what is noted."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from gradserve_server.accumulators import incoming as arriving
from gradserve_server.accumulators.incoming import GradientReceiver, IncomingGradient
from gradserve_server.accumulators.spec import AccumulatorSpec, ComponentSpec, Layout
from gradserve_server.devices.compute import InlineCompute
from gradserve_server.devices.host.kernels import ForkJoin
from gradserve_server.devices.host.reduction import Reducer
from gradserve_server.tensors.incoming import Attached, IncomingTensor, Inline
from gradserve_server.tensors.payload import Payload
from tests.accumulators.bench import F32, Bench
from tests.accumulators.gradients import gradient_of

SPEC = AccumulatorSpec(
    (
        ComponentSpec("a", F32),
        ComponentSpec("b", np.dtype(ml_dtypes.bfloat16)),
        ComponentSpec("e", F32, layout=Layout.SPARSE),
    ),
    refuse_non_finite=True,
)


class NotedPayload(Payload):
    """Notes for what a call waits."""

    def __init__(self) -> None:
        super().__init__((), None)
        self.waits: list[Any] = []

    async def arrived(self, part: Any = None) -> None:
        self.waits.append(None if part is None else part.nbytes)


def model(payload: NotedPayload, a: Any, b: Any) -> IncomingGradient:
    def attached(values: Any, dtype: Any) -> IncomingTensor:
        return Attached("", np.asarray(values, dtype), payload)

    rows = (attached([0], np.int64), attached([[1]], np.float32))
    return gradient_of({"b": attached(b, ml_dtypes.bfloat16), "e": rows, "a": attached(a, np.float32)}, payload)


async def receive(gradient: IncomingGradient, spec: AccumulatorSpec = SPEC) -> None:
    opener: Any = None
    await GradientReceiver(opener, InlineCompute(), Reducer(ForkJoin(1))).receive(spec, Bench().places.host, gradient)


@pytest.mark.parametrize(
    ("a", "b", "noted", "waits"),
    [
        ([1, 2], [3], {"a", "b"}, [2, 8, None]),
        ([1, np.nan], [3], {"b"}, [2, 8, None]),
        ([1, 2], [np.inf], set(), [2, None]),
        ([], [], {"a", "b"}, [None]),
    ],
)
async def test_dense_components_are_checked_in_the_order_in_which_they_arrive(
    a: Any, b: Any, noted: set[str], waits: list[int | None]
) -> None:
    payload = NotedPayload()
    given = model(payload, a, b)
    await receive(given)
    assert given.finite == noted
    assert payload.waits == waits


async def test_large_tensors_are_checked_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arriving, "_PART_BYTES", 8)
    payload = NotedPayload()
    given = model(payload, np.ones((3, 1)), np.ones(9))
    await receive(given)
    assert payload.waits == [8, 8, 2, 8, 4, None]


async def test_nothing_is_looked_at_unless_the_accumulator_says_so() -> None:
    payload = NotedPayload()
    given = model(payload, [np.nan], [1])
    await receive(given, AccumulatorSpec(SPEC.components))
    assert (given.finite, payload.waits) == (set(), [None])


async def test_what_is_in_the_message_is_left_to_the_addition() -> None:
    given = gradient_of({"": Inline("", np.ones(2, F32))})
    await receive(given, AccumulatorSpec((ComponentSpec("", F32),), refuse_non_finite=True))
    assert not given.finite
