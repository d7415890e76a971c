"""Gradients that are not finite: taken as TensorFlow takes them, or refused where the accumulator says so."""

import math
import threading
from typing import Any

import numpy as np
import pytest

import gradserve
from gradserve_server.accumulators.gradient import Contribution, Gradient
from gradserve_server.accumulators.spec import ComponentSpec
from gradserve_server.devices.compute import ThreadCompute
from gradserve_server.errors import InvalidArgumentError
from tests.accumulators.bench import F32, Bench, opened


def kinds(client: gradserve.Client, **options: Any) -> dict[str, Any]:
    return {
        "dense": client.conditional_accumulator("float32", (2, 2), **options),
        "sparse": client.sparse_conditional_accumulator("float16", (9, 2), **options),
        "model": client.gradient_accumulator({"w": np.ones(2), "b": gradserve.SparseSpec("float64")}, **options),
    }


def slices(rows: list[int], values: Any) -> gradserve.IndexedSlices:
    return gradserve.IndexedSlices(np.array(values), np.array(rows))


NAN, INF = math.nan, math.inf
REFUSED: dict[str, tuple[str, Any, str, str]] = {
    "dense nan": ("dense", [[1, 2], [NAN, 4]], "expected finite values, got nan at [1,0]", "gradient[0].dense"),
    "dense inf": ("dense", [[1, -INF], [NAN, 4]], "expected finite values, got -inf at [0,1]", "gradient[0].dense"),
    "sparse": (
        "sparse",
        slices([3, 7], [[1, 2], [3, INF]]),
        "expected finite values, got inf at [1,1], in row 7 of the whole tensor",
        "gradient[0].sparse.values",
    ),
    "dense component": (
        "model",
        {"w": [1, NAN], "b": slices([0], [1.0])},
        "expected finite values for component 'w', got nan at [1]",
        "gradient[0].dense",
    ),
    "sparse component": (
        "model",
        {"w": [1, 2], "b": slices([0, 4], [1.0, -INF])},
        "expected finite values for component 'b', got -inf at [1], in row 4 of the whole tensor",
        "gradient[1].sparse.values",
    ),
}


def apply(made: dict[str, Any], kind: str, grad: Any, **how: Any) -> Any:
    acc = made[kind]
    return acc.apply_indexed_slices_grad(grad, **how) if kind == "sparse" else acc.apply_grad(grad, **how)


@pytest.mark.parametrize("local_step", [0, 5])
@pytest.mark.parametrize("case", REFUSED)
def test_it_is_refused_and_changes_nothing(client: gradserve.Client, case: str, local_step: int) -> None:
    """Also when it is stale, as other gradients that cannot be."""
    kind, grad, message, field = REFUSED[case]
    made = kinds(client, refuse_non_finite=True)
    acc = made[kind]
    if local_step:
        acc.set_global_step(local_step + 1)
    before = acc.info()
    with pytest.raises(gradserve.InvalidArgumentError) as refusal:
        apply(made, kind, grad, local_step=local_step)
    assert refusal.value.message == message
    assert refusal.value.field == field
    assert acc.info() == before
    with pytest.raises(gradserve.InvalidArgumentError):
        apply(made, kind, grad, local_step=local_step, request_id=refusal.value.request_id)


def test_a_push_pull_is_refused_at_once(client: gradserve.Client) -> None:
    acc = kinds(client, refuse_non_finite=True)["model"]
    with pytest.raises(gradserve.InvalidArgumentError, match="for component 'w', got nan at"):
        acc.push_pull({"w": [NAN, NAN], "b": slices([], [])}, 2)
    assert acc.info().num_accumulated == acc.info().num_waiting == 0


def test_a_tensor_on_the_server_is_looked_at_and_stays(client: gradserve.Client) -> None:
    acc = kinds(client, refuse_non_finite=True)["dense"]
    handle = client.put(np.array([[0, 1], [2, INF]], np.float32))
    with pytest.raises(gradserve.InvalidArgumentError, match=r"got inf at \[1,1\]"):
        acc.apply_grad(handle)
    assert client.get(handle, release=True)[1, 1] == INF


def test_finite_ones_are_taken(client: gradserve.Client) -> None:
    made = kinds(client, refuse_non_finite=True)
    largest = np.full((2, 2), np.finfo(np.float32).max)
    made["dense"].apply_grad(largest)
    assert np.array_equal(made["dense"].take_grad(1), largest)
    made["sparse"].apply_indexed_slices_grad(slices([], np.zeros((0, 2))))
    assert made["sparse"].take_grad(1).values.size == 0


def test_without_the_option_they_are_taken(client: gradserve.Client) -> None:
    made = kinds(client)
    made["dense"].apply_grad([[NAN, 1], [INF, -INF]])
    assert np.array_equal(made["dense"].take_grad(1), [[NAN, 1], [INF, -INF]], equal_nan=True)
    made["sparse"].apply_grad([1], [[NAN, 1]])
    assert np.array_equal(made["sparse"].take_grad(1).values, [[NAN, 1]], equal_nan=True)


def test_the_option_is_part_of_what_an_accumulator_is(client: gradserve.Client, name: str) -> None:
    acc = client.conditional_accumulator("float32", shared_name=name, refuse_non_finite=True)
    client.conditional_accumulator("float32", shared_name=name, refuse_non_finite=True)
    with pytest.raises(gradserve.AlreadyExistsError, match="refuse_non_finite is True, not False"):
        client.conditional_accumulator("float32", shared_name=name)
    acc.delete()


# --- Where


class Threads(ThreadCompute):
    """Notes in which threads it worked."""

    def __init__(self) -> None:
        super().__init__(1)
        self.names: list[str] = []

    async def run_in_thread(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        def noting(*args: Any, **kwargs: Any) -> Any:
            self.names.append(threading.current_thread().name)
            return function(*args, **kwargs)

        return await super().run_in_thread(noting, *args, **kwargs)


@pytest.mark.parametrize(("refuse", "num_checks"), [(True, 1), (False, 0)])
async def test_large_gradients_are_looked_at_in_a_thread(refuse: bool, num_checks: int) -> None:
    compute = Threads()
    bench = Bench(compute)
    acc = bench.accumulator(ComponentSpec("", F32), refuse_non_finite=refuse)
    await acc.set_global_step(1)  # stale: looked at, not added
    large = np.ones(1 << 20, np.float32)
    await acc.apply(None, Contribution(), opened(Gradient({"": large})))
    assert len(compute.names) == num_checks
    large[-1] = NAN
    if refuse:
        with pytest.raises(InvalidArgumentError, match=r"got nan at \[1048575\]"):
            await acc.apply(None, Contribution(), opened(Gradient({"": large})))
    compute.close()
