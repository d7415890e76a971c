"""The bits of a step: the same compiled and with NumPy, on any number of threads, however components are cut."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradserve_server.devices.host.kernels import ForkJoin
from gradserve_server.parameters.optimizers.stepping import ComponentStep, Stepper
from tests.parameters.optimizers.conftest import CHUNK_ELEMENTS
from tests.parameters.optimizers.rounds import Array
from tests.parameters.optimizers.steps import (
    MASTERS,
    OPTIMIZERS,
    PAIRS,
    assert_same_bits,
    assert_same_steps,
    component,
    copied,
    step_by_element,
)

SHAPES: list[tuple[int, ...]] = [
    (5,),
    (0,),
    (),
    (37, 3),
    (1,),
    (CHUNK_ELEMENTS,),
    (2, 4, 8),
    (CHUNK_ELEMENTS * 20 + 3,),
    (3, 0),
]


@pytest.mark.sampled
@pytest.mark.parametrize(("update", "master"), PAIRS)
@pytest.mark.parametrize("parts", ["both", "sum", "addend"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_bits(stepper: Stepper, name: str, parts: str, update: Any, master: Any) -> None:
    optimizer = OPTIMIZERS[name]
    steps = [
        component(optimizer, shape, seed, update=update, master=master, parts=parts)
        for seed, shape in enumerate(SHAPES)
    ]
    expected, given_ = copied(steps), [each for step in steps for each in _read_only(step)]
    before = [each.copy() for each in given_]
    step_by_element(optimizer, 0.7, expected)
    stepper.step(optimizer, 0.7, steps)
    assert_same_steps(steps, expected)
    for one, other in zip(given_, before, strict=True):
        assert_same_bits(one.astype(np.float64), other.astype(np.float64))


def _read_only(step: ComponentStep) -> list[Array]:
    return [each for each in (step.total, step.addend, step.parameter) if each is not None]


def test_components_of_several_dtypes_steps_and_parts_in_one_call(stepper: Stepper) -> None:
    optimizer = OPTIMIZERS["adam"]
    kinds = [(update, master, parts) for update, master in PAIRS for parts in ("both", "sum", "addend")]
    steps = [
        component(optimizer, (3, 50), seed, update=update, master=master, parts=parts)
        for seed, (update, master, parts) in enumerate(kinds)
    ]
    expected = copied(steps)
    step_by_element(optimizer, 1.0, expected)
    stepper.step(optimizer, 1.0, steps)
    assert_same_steps(steps, expected)


def test_an_update_that_lies_anywhere_in_its_message(stepper: Stepper) -> None:
    optimizer = OPTIMIZERS["nesterov"]
    step = component(optimizer, (500,), 1, update=np.float32, master=np.float32)
    memory = np.zeros(500 * 4 + 1, np.uint8)
    unaligned = memory[1:].view(np.float32)
    assert step.addend is not None
    unaligned[:] = step.addend
    assert not unaligned.flags.aligned
    (expected,) = copied([step])
    step_by_element(optimizer, 1.0, [expected])
    moved = replace(step, addend=unaligned)
    stepper.step(optimizer, 1.0, [moved])
    assert_same_steps([moved], [expected])


def test_no_components(stepper: Stepper) -> None:
    stepper.step(OPTIMIZERS["adam"], 1.0, [])
    empty = component(OPTIMIZERS["adam"], (0, 3), 1, update=np.float32, master=np.float32)
    stepper.step(OPTIMIZERS["adam"], 1.0, [empty])


@pytest.mark.usefixtures("_compiled_kernels")
@pytest.mark.parametrize("num_checks", [0, 1])
def test_steps_are_right_before_all_kernels_are_ready(num_checks: int) -> None:
    optimizer, parallel = OPTIMIZERS["yogi"], ForkJoin(2)
    stepper = Stepper(parallel)
    checks = iter([False] * num_checks)
    stepper.prepare(lambda: next(checks, True))
    steps = [component(optimizer, (300,), 1, update=dtype, master=dtype) for dtype in MASTERS]
    expected = copied(steps)
    step_by_element(optimizer, 1.0, expected)
    stepper.step(optimizer, 1.0, steps)
    assert_same_steps(steps, expected)
    parallel.close()


def _part(step: ComponentStep, begin: int, end: int) -> ComponentStep:
    """Returns the step of some elements, in memory of their own as on another server."""

    def cut(given: Array | None) -> Any:
        return None if given is None else given[begin:end].copy()

    return replace(
        step,
        total=cut(step.total),
        addend=cut(step.addend),
        parameter=cut(step.parameter),
        slots=tuple(cut(slot) for slot in step.slots),
        result=cut(step.result),
    )


@pytest.fixture(scope="module")
def of_chunk_size(_compiled_kernels: None) -> Callable[[int, bool], Stepper]:
    parallel = ForkJoin(2)
    made: dict[tuple[int, bool], Stepper] = {}

    def get(chunk_elements: int, is_compiled: bool) -> Stepper:
        if (chunk_elements, is_compiled) not in made:
            made[chunk_elements, is_compiled] = Stepper(parallel, chunk_elements=chunk_elements)
            if is_compiled:
                made[chunk_elements, is_compiled].prepare(lambda: False)
        return made[chunk_elements, is_compiled]

    return get


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(OPTIMIZERS)),
    master=st.sampled_from(MASTERS),
    size=st.integers(1, 3000),
    cuts=st.lists(st.integers(0, 3000), max_size=4),
    chunk_elements=st.sampled_from([1, 7, 64, 1 << 16]),
    is_compiled=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_however_components_are_divided_among_servers_and_chunks_the_bits_are_the_same(
    of_chunk_size: Callable[[int, bool], Stepper],
    name: str,
    master: Any,
    size: int,
    cuts: list[int],
    chunk_elements: int,
    is_compiled: bool,
    seed: int,
) -> None:
    optimizer = OPTIMIZERS[name]
    whole = component(optimizer, (size,), seed, update=master, master=master)
    bounds = sorted({0, size, *(cut % size for cut in cuts)})
    parts = [_part(whole, begin, end) for begin, end in pairwise(bounds)]
    of_chunk_size(1 << 16, True).step(optimizer, 0.5, [whole])
    for part in parts[1::2]:
        of_chunk_size(chunk_elements, is_compiled).step(optimizer, 0.5, [part])
    of_chunk_size(chunk_elements, is_compiled).step(optimizer, 0.5, parts[::2])
    assert_same_bits(np.concatenate([part.result for part in parts]), whole.result)
    for index, slot in enumerate(whole.slots):
        assert_same_bits(np.concatenate([part.slots[index] for part in parts]), slot)
