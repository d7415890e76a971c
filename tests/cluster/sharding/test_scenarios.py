"""What TensorFlow's own tests of accumulators check, on sharded ones; those that cannot be sharded are whole."""

import itertools
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import gradserve
import gradserve.aio
from gradserve_testing import LocalServer
from tests.accumulators.scenarios.faces import Acc, AioAcc, BlockingAcc, Face, Shape, rows
from tests.accumulators.test_scenarios import *  # noqa: F403  all of them, with the faces of this module
from tests.cluster.servers import addresses_of, running_cluster
from tests.cluster.sharding.clients import small_pieces
from tests.servers.polling import PATIENCE_SECONDS

del test_dense_shape_of_the_result  # noqa: F821  rows of another rank than the table's are refused; see the end

FACES = [
    *[f"blocking over {way}, {size}" for way, size in itertools.product(("shared_memory", "grpc"), (2, 3))],
    "aio over bulk, 2",
    "aio over grpc, 3",
]


@pytest.fixture(scope="module")
def clusters() -> Iterator[dict[str, list[LocalServer]]]:
    with small_pieces(), running_cluster(2) as two, running_cluster(3) as three:
        yield {"2": two, "3": three}


FEW_FACES = {"blocking over shared_memory, 2", "aio over grpc, 3"}


@pytest.fixture(  # type: ignore[no-redef]
    params=[pytest.param(each, marks=[] if each in FEW_FACES else [pytest.mark.exhaustive]) for each in FACES]
)
async def face(request: pytest.FixtureRequest, clusters: dict[str, list[LocalServer]]) -> AsyncIterator[Face]:
    way: Any
    kind, _, rest = request.param.partition(" over ")
    way, _, size = rest.partition(", ")
    addresses = addresses_of(clusters[size])
    if kind == "aio":
        async with gradserve.aio.connect(addresses, timeout=PATIENCE_SECONDS, transport=way) as client:
            yield AioShardedFace(client)
    else:
        with (
            ThreadPoolExecutor(16) as threads,
            gradserve.connect(addresses, timeout=PATIENCE_SECONDS, transport=way) as blocking,
        ):
            yield BlockingShardedFace(blocking, threads)


def _sharded(shape: Shape, *, is_sparse: bool) -> bool:
    return shape is not None and None not in shape[is_sparse:] and (bool(shape) or not is_sparse)


class BlockingShardedFace:
    """The blocking client of several servers, its calls in threads."""

    def __init__(self, client: gradserve.Client, threads: ThreadPoolExecutor) -> None:
        self._client = client
        self._threads = threads

    async def dense(self, dtype: str, shape: Shape = None, reduction: str = "MEAN") -> Acc:
        return self._made(gradserve.DenseSpec(dtype, shape), reduction, _sharded(shape, is_sparse=False))

    async def sparse(self, dtype: str, shape: Shape = None, reduction: str = "MEAN") -> Acc:
        return self._made(gradserve.SparseSpec(dtype, shape), reduction, _sharded(shape, is_sparse=True))

    def _made(self, spec: Any, reduction: str, sharded: bool) -> "BlockingShardedAcc":
        made = self._client.gradient_accumulator(spec, reduction_type=reduction, sharded=sharded)
        return BlockingShardedAcc(made, self._threads)


class BlockingShardedAcc(BlockingAcc):
    async def apply(self, gradient: Any, local_step: int = 0) -> gradserve.Outcome:
        result = await self._in_thread(self._accumulator.apply_grad, gradient, local_step)
        return result.outcome  # type: ignore[no-any-return]

    async def take(self, num_required: int) -> Any:
        return (await super().take(num_required)).gradients


class AioShardedFace:
    """The asyncio client of several servers."""

    def __init__(self, client: gradserve.aio.Client) -> None:
        self._client = client

    async def dense(self, dtype: str, shape: Shape = None, reduction: str = "MEAN") -> Acc:
        return await self._made(gradserve.DenseSpec(dtype, shape), reduction, _sharded(shape, is_sparse=False))

    async def sparse(self, dtype: str, shape: Shape = None, reduction: str = "MEAN") -> Acc:
        return await self._made(gradserve.SparseSpec(dtype, shape), reduction, _sharded(shape, is_sparse=True))

    async def _made(self, spec: Any, reduction: str, sharded: bool) -> "AioShardedAcc":
        made = await self._client.gradient_accumulator(spec, reduction_type=reduction, sharded=sharded)
        return AioShardedAcc(made)


class AioShardedAcc(AioAcc):
    async def apply(self, gradient: Any, local_step: int = 0) -> gradserve.Outcome:
        return (await self._accumulator.apply_grad(gradient, local_step)).outcome  # type: ignore[no-any-return]

    async def take(self, num_required: int) -> Any:
        return (await super().take(num_required)).gradients


@pytest.mark.parametrize(
    ("shape", "values", "expected"),
    [((2, 3), (1, 3), (2, 3)), ((None, 3), (1, 3), (-1, 3)), ((None, 3), (1, 3, 4), None), ((4, 2), (1, 3), None)],
)
async def test_rows_have_the_shape_of_those_of_the_table(
    face: Face, shape: Any, values: tuple[int, ...], expected: Any
) -> None:
    """A server checks a part of a gradient before it knows the round, and so the shapes of the others."""
    acc = await face.sparse("float32", shape)
    if expected is None:
        with pytest.raises(gradserve.InvalidArgumentError):
            await acc.apply(rows([0], np.ones(values)))
        assert await acc.num_accumulated() == 0
    else:
        await acc.apply(rows([0], np.ones(values)))
        assert (await acc.take(1)).dense_shape == expected
