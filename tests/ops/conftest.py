"""The threads on which gradients are computed on the host."""

from collections.abc import Iterator

import pytest

from gradserve_server.devices.host.kernels import ForkJoin


@pytest.fixture(scope="module")
def parallel() -> Iterator[ForkJoin]:
    fork_join = ForkJoin(2)
    yield fork_join
    fork_join.close()
