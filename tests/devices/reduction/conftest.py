"""Reducers with small chunks: with kernels and without, on several threads and on one."""

from collections.abc import Iterator

import pytest

from gradserve_server.devices.host.kernels import ForkJoin
from gradserve_server.devices.host.reduction import Reducer

CHUNK_ELEMENTS = 64


def shares(num_threads: int, *, prepared: bool) -> Iterator[Reducer]:
    parallel = ForkJoin(num_threads)
    reducer = Reducer(parallel, shared_bytes=1, chunk_elements=CHUNK_ELEMENTS)
    if prepared:
        reducer.prepare(lambda: False)
    yield reducer
    parallel.close()


@pytest.fixture(
    scope="module",
    params=[(3, True), (1, True), (3, False), (1, False), None],
    ids=["kernels", "kernels in one thread", "NumPy", "NumPy in one thread", "little work"],
)
def reducer(request: pytest.FixtureRequest, _compiled_kernels: None) -> Iterator[Reducer]:
    if request.param is None:
        parallel = ForkJoin(1)
        yield Reducer(parallel)
        parallel.close()
    else:
        yield from shares(request.param[0], prepared=request.param[1])
