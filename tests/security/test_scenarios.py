"""A few scenarios of accumulators over encrypted connections, with both clients."""

from collections.abc import AsyncIterator, Iterator

import pytest

from gradserve_testing import LocalServer
from tests.accumulators.scenarios.faces import Face, open_face
from tests.accumulators.test_scenarios import (  # noqa: F401
    test_blocked_take,
    test_empty_gradients_count,
    test_matrix,
    test_mean_of_ten,
    test_parallel_applies,
    test_parallel_takes,
    test_queue_is_strict,
    test_two_rounds,
)
from tests.servers.certificates import Certificates


@pytest.fixture(scope="module")
def secure_server(certificates: Certificates) -> Iterator[LocalServer]:
    with LocalServer(certificates.config(asks_clients=True)) as server:
        yield server


@pytest.fixture(params=[f"{client} over {way}" for client in ("blocking", "aio") for way in ("bulk", "grpc")])
async def face(
    request: pytest.FixtureRequest, secure_server: LocalServer, certificates: Certificates
) -> AsyncIterator[Face]:
    tls = certificates.client("worker-1")
    async with open_face(request.param, lambda: secure_server.address, tls) as opened:
        yield opened
