"""Steppers with small chunks: compiled and not, on several threads and on one."""

from collections.abc import Iterator

import pytest

from gradserve_server.devices.host.kernels import ForkJoin
from gradserve_server.parameters.optimizers.stepping import Stepper

CHUNK_ELEMENTS = 64


@pytest.fixture(
    scope="module",
    params=[(2, True), (1, True), (2, False), (1, False)],
    ids=["kernels", "kernels in one thread", "NumPy", "NumPy in one thread"],
)
def stepper(request: pytest.FixtureRequest, _compiled_kernels: None) -> Iterator[Stepper]:
    num_threads, prepared = request.param
    parallel = ForkJoin(num_threads)
    made = Stepper(parallel, chunk_elements=CHUNK_ELEMENTS)
    if prepared:
        made.prepare(lambda: False)
    yield made
    parallel.close()


@pytest.fixture(scope="module")
def compiled(_compiled_kernels: None) -> Iterator[Stepper]:
    parallel = ForkJoin(2)
    made = Stepper(parallel)
    made.prepare(lambda: False)
    yield made
    parallel.close()
