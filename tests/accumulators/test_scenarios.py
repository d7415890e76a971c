"""What TensorFlow's own tests of accumulators check, on the core, through both clients on every way, and by raw ops."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest

import gradserve
from gradserve import ACCEPTED, STALE
from gradserve.testing import InProcessServer
from tests.accumulators.scenarios.faces import FACES, Acc, Face, open_face, rows
from tests.servers.polling import eventually_async

INVALID = gradserve.InvalidArgumentError

pytestmark = pytest.mark.sampled


@pytest.fixture(scope="module")
def in_process_address(_compiled_kernels: None) -> Iterator[str]:
    with InProcessServer() as server:
        yield server.address


MANY_WAYS = [*FACES, "blocking in this process", "aio in this process"]
FEW_WAYS = {
    "core",
    "core on a device",
    "blocking over shared_memory",
    "aio over grpc",
    "raw_ops",
    "aio in this process",
}
"""The faces of the short suite: each kind and each way of transport, but not each with each."""


@pytest.fixture(
    params=[pytest.param(each, marks=[] if each in FEW_WAYS else [pytest.mark.exhaustive]) for each in MANY_WAYS]
)
async def face(request: pytest.FixtureRequest) -> AsyncIterator[Face]:
    get: Any = request.getfixturevalue
    kind, is_in_process, _ = request.param.partition(" in this process")
    address = "in_process_address" if is_in_process else "server_address"
    kind = f"{kind} over auto" if is_in_process else kind
    async with open_face(kind, lambda: get(address), programs=lambda: get("compiled")) as opened:
        yield opened


async def waiting(acc: Acc, count: int) -> None:
    """Returns once `count` takes stand in the queue."""
    await eventually_async(acc.num_waiting, lambda seen: seen == count)


async def blocked_takes(acc: Acc, *nums_required: int) -> list["asyncio.Task[Any]"]:
    """Starts takes that block, in this order."""
    tasks = []
    for position, num_required in enumerate(nums_required, start=1):
        tasks.append(asyncio.create_task(acc.take(num_required)))
        await waiting(acc, position)
    return tasks


async def accepts(acc: Acc, gradient: Any, local_step: int = 0) -> bool:
    """Applies a gradient and returns whether it counts; asserts that this is what was said, if anything was."""
    before = await acc.num_accumulated()
    outcome = await acc.apply(gradient, local_step)
    counts = await acc.num_accumulated() == before + 1
    assert outcome in (None, ACCEPTED if counts else STALE)
    return counts


def same(found: Any, expected: Any) -> None:
    """Asserts equal values, or equal indices, values and dense shapes."""
    if isinstance(found, gradserve.IndexedSlices):
        indices, values, shape = expected
        np.testing.assert_array_equal(found.indices, indices)
        np.testing.assert_allclose(found.values.astype(np.float64), values, rtol=1e-3)
        assert found.dense_shape == shape
        assert found.indices.dtype == np.int64
    else:
        np.testing.assert_allclose(np.asarray(found, np.float64), expected, rtol=1e-6)


# Dense


@pytest.mark.parametrize("reduction", ["Invalid", "Mean", ""])
async def test_unknown_reduction_is_refused(face: Face, reduction: str) -> None:
    with pytest.raises(INVALID):
        await face.dense("float32", (1,), reduction)
    with pytest.raises(INVALID):
        await face.sparse("float32", (1,), reduction)


async def test_new_accumulator_is_empty(face: Face) -> None:
    acc = await face.dense("float32", (1,))
    assert await acc.num_accumulated() == 0


async def test_set_global_step(face: Face) -> None:
    acc = await face.dense("float32", (1,))
    for step in (1, 2, 3, 2, -1):
        await acc.set_global_step(step)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
async def test_mean_of_ten(face: Face, dtype: str) -> None:
    acc = await face.dense(dtype, (1,))
    for value in range(10):
        assert await accepts(acc, [value])
    taken = await acc.take(1)
    assert str(taken.dtype) == dtype
    same(taken, [4.5])


async def test_accumulators_are_independent(face: Face) -> None:
    accs = [await face.dense("float32", (1,)) for _ in range(4)]
    for i, acc in enumerate(accs):
        await acc.apply([i + 10.0])
    assert [(await acc.take(1)).item() for acc in accs] == [10, 11, 12, 13]


@pytest.mark.parametrize("shape", [(3, 2), None, (3, None), (None, None)])
async def test_matrix(face: Face, shape: Any) -> None:
    acc = await face.dense("float32", shape)
    gradient = np.array([[1, 2], [3, 4], [5, 6]], np.float32)
    await acc.apply(gradient)
    await acc.apply(gradient * 10)
    same(await acc.take(1), [[5.5, 11], [16.5, 22], [27.5, 33]])


@pytest.mark.parametrize(
    ("shape", "text", "bad"),
    [
        ((3, 2), "[3,2]", (2, 2)),
        ((3, 2), "[3,2]", (3, 1)),
        ((3, None), "[3,?]", (2, 2)),
        ((None, 3), "[?,3]", (3,)),
        ((), "[]", (1,)),
        ((1,), "[1]", ()),
    ],
)
async def test_wrong_shape(face: Face, shape: Any, text: str, bad: tuple[int, ...]) -> None:
    acc = await face.dense("float32", shape)
    got = "[" + ",".join(map(str, bad)) + "]"
    with pytest.raises(INVALID, match=rf"^Shape mismatch: expected {escape(text)}, got {escape(got)} \[GS_\w+\]$"):
        await acc.apply(np.zeros(bad))
    assert await acc.num_accumulated() == 0


async def test_unknown_shape_is_fixed_by_the_first_gradient_of_a_round(face: Face) -> None:
    acc = await face.dense("float32")
    await acc.apply(np.ones((3, 2)))
    for bad in [(2, 2), (3, 1)]:
        with pytest.raises(INVALID, match=r"Shape mismatch: expected \[3,2\], got"):
            await acc.apply(np.ones(bad))
    assert await acc.num_accumulated() == 1
    await acc.take(1)
    assert await accepts(acc, np.ones((2, 2)), 1)


async def test_round_shape_is_reported_before_the_declared_one(face: Face) -> None:
    acc = await face.dense("float32", (3, None))
    await acc.apply(np.ones((3, 2)))
    with pytest.raises(INVALID, match=r"^Shape mismatch: expected \[3,2\], got \[4,4\] \[GS_\w+\]$"):
        await acc.apply(np.ones((4, 4)))


async def test_scalar(face: Face) -> None:
    acc = await face.dense("float32", ())
    await acc.apply(3.0)
    taken = await acc.take(1)
    assert taken.shape == ()
    assert taken == 3


async def test_empty_gradients_count(face: Face) -> None:
    acc = await face.dense("float32", (0, 3))
    await acc.apply(np.zeros((0, 3)))
    await acc.apply(np.zeros((0, 3)))
    assert await acc.num_accumulated() == 2
    assert (await acc.take(2)).shape == (0, 3)


async def test_num_accumulated(face: Face) -> None:
    acc = await face.dense("float32", (1,))
    counts = [await acc.num_accumulated()]
    for _ in range(2):
        await acc.apply([10.0])
        counts.append(await acc.num_accumulated())
    await acc.take(2)
    counts.append(await acc.num_accumulated())
    for _ in range(4):
        await acc.apply([10.0], 1)
    counts.append(await acc.num_accumulated())
    await acc.take(2)
    counts.append(await acc.num_accumulated())
    assert counts == [0, 1, 2, 0, 4, 0]


@pytest.mark.parametrize(
    ("reduction", "second", "expected"),
    [
        ("MEAN", (10, 20), (15, 15)),
        ("SUM", (10, 20), (30, 30)),
        ("MEAN", (20, 30), (15, 25)),
        ("SUM", (20, 30), (30, 50)),
    ],
)
async def test_two_rounds(
    face: Face, reduction: str, second: tuple[float, float], expected: tuple[float, float]
) -> None:
    acc = await face.dense("float32", (1,), reduction)
    for step, values in enumerate([(10.0, 20.0), second]):
        for value in values:
            await acc.apply([value], step)
        same(await acc.take(1), [expected[step]])


@pytest.mark.parametrize("num_required", [-1, 0, -(2**31)])
async def test_take_of_none(face: Face, num_required: int) -> None:
    acc = await face.dense("float32", (1,))
    await acc.apply([10.0])
    await acc.apply([10.0])
    with pytest.raises(INVALID, match=rf"^Argument num_required must be positive, but was {num_required} \[GS_\w+\]$"):
        await acc.take(num_required)
    assert await acc.num_accumulated() == 2


async def test_stale_gradients_are_dropped(face: Face) -> None:
    acc = await face.dense("float32", (1,))
    for step, expected in zip(range(1000, 1005), [1002, 1002.5, 1003, 1003.5, 1004], strict=True):
        await acc.set_global_step(step)
        for value in range(1000, 1005):
            assert await accepts(acc, [value], value) is (value >= step)
        same(await acc.take(1), [expected])


async def test_gradients_of_later_steps_are_welcome(face: Face) -> None:
    acc = await face.dense("float32", (1,))
    assert await accepts(acc, [1.0], 2**62)


async def test_take_bumps_the_current_step(face: Face) -> None:
    acc = await face.dense("float32", (1,))
    await acc.set_global_step(100)
    await acc.apply([1.0], 105)
    await acc.take(1)
    assert not await accepts(acc, [1.0], 100)
    assert await accepts(acc, [1.0], 101)


async def test_set_global_step_keeps_what_is_in(face: Face) -> None:
    acc = await face.dense("float32", (1,))
    await acc.apply([8.0], 0)
    await acc.set_global_step(7)
    assert await acc.num_accumulated() == 1
    same(await acc.take(1), [8])


async def test_all_that_is_in_is_averaged(face: Face) -> None:
    acc = await face.dense("float32", (1,))
    for value in (1.0, 2.0, 3.0, 4.0, 5.0):
        await acc.apply([value])
    same(await acc.take(2), [3])
    assert await acc.num_accumulated() == 0


async def test_parallel_applies(face: Face) -> None:
    acc = await face.dense("float32", (1,))
    await asyncio.gather(*(acc.apply([value]) for value in range(10, 101, 10)))
    same(await acc.take(1), [55])


async def test_parallel_takes(face: Face) -> None:
    acc = await face.dense("float32", (1,))
    tasks = await blocked_takes(acc, *[1] * 10)
    for step in range(10):
        await acc.apply([step], step)
    assert [(await task).item() for task in tasks] == list(range(10))


async def test_blocked_take(face: Face) -> None:
    acc = await face.dense("float32", (1,))
    (take,) = await blocked_takes(acc, 3)
    for value in (10.0, 20.0, 30.0):
        assert not take.done()
        await acc.apply([value])
    same(await take, [20])


async def test_queue_is_strict(face: Face) -> None:
    """The head holds up those behind it, however little they need."""
    acc = await face.dense("float32", (1,))
    first, second = await blocked_takes(acc, 3, 1)
    await acc.apply([1.0])
    assert not second.done()
    await acc.apply([2.0])
    await acc.apply([3.0])
    same(await first, [2])
    await waiting(acc, 1)
    assert not second.done()
    await acc.apply([9.0], 1)
    same(await second, [9])


async def test_bad_take_passes_those_who_wait(face: Face) -> None:
    acc = await face.dense("float32", (1,))
    (take,) = await blocked_takes(acc, 1)
    with pytest.raises(INVALID):
        await acc.take(0)
    await acc.apply([1.0])
    same(await take, [1])


async def test_result_is_independent(face: Face) -> None:
    acc = await face.dense("float32", (2,))
    await acc.apply([1.0, 2.0])
    taken = await acc.take(1)
    await acc.apply([10.0, 20.0], 1)
    same(taken, [1, 2])


async def test_nan_and_infinity_propagate(face: Face) -> None:
    acc = await face.dense("float32", (3,))
    await acc.apply([np.nan, np.inf, np.inf])
    await acc.apply([1.0, 1.0, -np.inf])
    np.testing.assert_array_equal(await acc.take(2), np.array([np.nan, np.inf, np.nan], np.float32))


# Sparse


async def test_sparse_counts(face: Face) -> None:
    acc = await face.sparse("float32", (3, 3))
    await acc.apply(rows([0, 2], [[0, 0, 1], [3, 0, 4]]))
    assert await acc.num_accumulated() == 1


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
async def test_sparse_cube(face: Face, dtype: str) -> None:
    for i in range(3):
        acc = await face.sparse(dtype, (3, 3, 3))
        row = np.zeros((1, 3, 3))
        row[0, i, i] = 1
        await acc.apply(rows([i], row))
        await acc.apply(rows([i], row * 2))
        taken = await acc.take(1)
        assert str(taken.values.dtype) == dtype
        same(taken, ([i], row * 1.5, (3, 3, 3)))


@pytest.mark.parametrize(
    ("reduction", "first", "second"),
    [
        ("MEAN", [[0.5, 0.5], [0, 2], [3, 0]], [[5, 5], [0, 20], [30, 0]]),
        ("SUM", [[1, 1], [0, 2], [3, 0]], [[10, 10], [0, 20], [30, 0]]),
    ],
)
async def test_each_row_by_its_own_count(face: Face, reduction: str, first: Any, second: Any) -> None:
    acc = await face.sparse("float32", (), reduction)
    for step, (factor, expected) in enumerate([(1, first), (10, second)]):
        await acc.apply(rows([0, 1], np.array([[1, 0], [0, 2]]) * factor), step)
        await acc.apply(rows([0, 2], np.array([[0, 1], [3, 0]]) * factor, (3, 2)), step)
        same(await acc.take(1), ([0, 1, 2], expected, (-1, 2)))


@pytest.mark.parametrize(("reduction", "expected"), [("MEAN", 55), ("SUM", 550)])
async def test_sparse_parallel_applies(face: Face, reduction: str, expected: float) -> None:
    acc = await face.sparse("float32", (2, 2), reduction)
    await asyncio.gather(*(acc.apply(rows([0, 1], np.eye(2) * value)) for value in range(10, 101, 10)))
    same(await acc.take(1), ([0, 1], np.eye(2) * expected, (2, 2)))


async def test_sparse_parallel_takes(face: Face) -> None:
    acc = await face.sparse("float32", (2, 2))
    tasks = await blocked_takes(acc, *[1] * 10)
    for step in range(10):
        await acc.apply(rows([1, 0][:1], [[step + 1, 0]]), step)
    for step, task in enumerate(tasks):
        same(await task, ([1], [[step + 1, 0]], (2, 2)))


async def test_sparse_blocked_take(face: Face) -> None:
    acc = await face.sparse("float32", ())
    (take,) = await blocked_takes(acc, 3)
    for value in (10.0, 20.0, 30.0):
        await acc.apply(rows([0, 1], [[value, value], [value, value]]))
    same(await take, ([0, 1], [[20, 20], [20, 20]], (-1, 2)))


@pytest.mark.parametrize(
    ("shape", "gradient", "text"),
    [
        (None, rows([[0, 1], [1, 0]], [1, 2]), "Input indices should be vector but received shape: [2,2]"),
        (None, rows([0], 1), "Values cannot be 0-dimensional."),
        (None, rows([0, 1], [[0, 1, 1]]), "Expected 2 non-empty input values, got 1"),
        ((), rows(0, 1), "Input indices should be vector but received shape: []"),
        ((), rows(0, 1, ()), "Input indices should be vector but received shape: []"),
        ((), rows([0], 1), "Values cannot be 0-dimensional."),
        ((), rows([0], 1, ()), "Values cannot be 0-dimensional."),
        ((2, 2, None), rows([0], np.ones((1, 2)), (2, 2)), "Shape mismatch: expected shape rank at least 3, got 2"),
        ((2, 2, None), rows([0], np.ones((1, 3, 2)), (2, 3, 2)), "Shape mismatch: expected shape dim 1 to be 2, got 3"),
        (
            (2, 2, None),
            rows([3], np.ones((1, 2, 2))),
            "Shape mismatch: index of slice 0 exceeded limits of shape; index is 3 exceeded 2",
        ),
        (
            (2, 2, None),
            rows([0, 1, 2], np.ones((3, 2, 2))),
            "Shape mismatch: index of slice 2 exceeded limits of shape; index is 2 exceeded 2",
        ),
        ((2, 2, None), rows([0, 1], np.ones((2, 2))), "Shape mismatch: expected values rank at least 3, got 2"),
        ((2, 2, None), rows([0], np.ones((1, 3, 2))), "Shape mismatch: expected values dim 1 to be 2, got 3"),
        ((2, 2), rows([0, -1], np.ones((2, 2))), "expected indices of at least 0, got -1 at 1"),
    ],
)
async def test_sparse_checks(face: Face, shape: Any, gradient: Any, text: str) -> None:
    acc = await face.sparse("float32", shape)
    with pytest.raises(INVALID, match=rf"^{escape(text)} \[GS_\w+\]$"):
        await acc.apply(gradient)
    assert await acc.num_accumulated() == 0


@pytest.mark.parametrize("gradient", [rows([0], [1.0]), rows([0], [1.0], ())])
async def test_sparse_scalar_shape_takes_vectors(face: Face, gradient: Any) -> None:
    acc = await face.sparse("float32", ())
    assert await accepts(acc, gradient)


async def test_sparse_values_may_have_more_dimensions(face: Face) -> None:
    acc = await face.sparse("float32", (2, 2, None))
    await acc.apply(rows([0], np.ones((1, 2, 2, 2))))
    with pytest.raises(INVALID, match=r"^Shape mismatch: expected values rank 4, got 3 \[GS_\w+\]$"):
        await acc.apply(rows([0], np.ones((1, 2, 2))))
    with pytest.raises(INVALID, match=r"^Shape mismatch: expected values dim 3 to be 2, got 3 \[GS_\w+\]$"):
        await acc.apply(rows([0], np.ones((1, 2, 2, 3))))
    await acc.take(1)
    await acc.apply(rows([0], np.ones((1, 2, 2, 3))), 1)
    with pytest.raises(INVALID, match=r"^Shape mismatch: expected values dim 3 to be 3, got 2 \[GS_\w+\]$"):
        await acc.apply(rows([0], np.ones((1, 2, 2, 2))), 1)


@pytest.mark.parametrize(
    ("shape", "values", "expected"),
    [((2, None), (1, 2, 2, 2), (2, 2, 2, 2)), ((None, 2), (1, 2, 2, 3), (-1, 2, 2, 3)), (None, (1, 4), (-1, 4))],
)
async def test_dense_shape_of_the_result(face: Face, shape: Any, values: Any, expected: Any) -> None:
    acc = await face.sparse("float32", shape)
    await acc.apply(rows([0], np.ones(values)))
    assert (await acc.take(1)).dense_shape == expected


async def test_int32_indices(face: Face) -> None:
    acc = await face.sparse("float32", (3, 3))
    gradient = rows(np.array([0, 2], np.int32), [[0, 0, 1], [3, 0, 4]], (3, 3))
    await acc.apply(gradient)
    await acc.apply(gradient)
    assert await acc.num_accumulated() == 2
    same(await acc.take(1), ([0, 2], [[0, 0, 1], [3, 0, 4]], (3, 3)))


@pytest.mark.parametrize(
    ("first", "second", "indices", "sums", "mean"),
    [
        (([1, 1], [1, 2]), ([1, 1], [10, 20]), [1, 1], [11, 22], [5.5, 11]),
        (([1], [1]), ([1, 1], [10, 20]), [1, 1], [11, 20], [5.5, 20]),
        (([2, 0], [2, 1]), ([0, 2], [10, 20]), [0, 2, 0], [10, 22, 1], [10, 11, 1]),
        (([], []), ([3], [7]), [3], [7], [7]),
        (([3], [7]), ([], []), [3], [7], [7]),
        (([0, 5], [1, 1]), ([1, 2, 9], [1, 2, 3]), [0, 1, 2, 5, 9], [1, 1, 2, 1, 3], [1, 1, 2, 1, 3]),
    ],
)
async def test_two_pointer_merge(
    face: Face, first: Any, second: Any, indices: list[int], sums: list[float], mean: list[float]
) -> None:
    for reduction, expected in (("SUM", sums), ("MEAN", mean)):
        acc = await face.sparse("float32", None, reduction)
        await acc.apply(rows(*first))
        await acc.apply(rows(*second))
        assert await acc.num_accumulated() == 2
        same(await acc.take(2), (indices, expected, (-1,)))


async def test_half_rounds_as_documented(face: Face) -> None:
    acc = await face.sparse("float16")
    for _ in range(3):
        await acc.apply(rows([0], [0.1]))
    same(await acc.take(3), ([0], [0.1], (-1,)))


def escape(text: str) -> str:
    """Escapes what a regular expression would read as its own."""
    for character in "[]?.()":
        text = text.replace(character, "\\" + character)
    return text
