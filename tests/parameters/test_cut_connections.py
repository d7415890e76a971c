"""Updates count exactly once, whatever the connections do, on every way in which they travel.

Every update is one at its own place, sent up to four times in all with one request id, over connections that are cut at
random. One round takes all of them, so the version shows each update that was lost or counted twice, and the weights of
the server's books agree.
"""

import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest

import gradserve
from gradserve import optim
from gradserve.calls.exchange import TimeLimits
from gradserve.testing import ConnectionFaults
from gradserve.transport.settings import ConnectionSettings, Transport
from gradserve_protocol.tls import client_certificates
from gradserve_server.config import ServerConfig
from gradserve_testing import LocalServer
from tests.servers.announcing import behind
from tests.servers.certificates import Certificates, make_certificates
from tests.servers.connecting import NO_RETRIES, connect_with
from tests.servers.polling import PATIENCE_SECONDS
from tests.servers.runtime import NOT_WARMED_UP

INLINE, LARGE = 16, 40_000
"""Floats at each place: messages carry 64 bytes within themselves, and 160 kB beside them."""
MOST_SENT = 4
PAUSE_SECONDS = 0.01
"""The pause after a failure: as long as gRPC waits before it connects again, every call fails at once."""
THREADS = 4
MANY = 10_000


@dataclass(frozen=True)
class Way:
    """A way in which updates travel.

    Attributes:
        transport: The transport of the clients.
        size: The number of floats of an update.
        mean_reads: The mean number of pieces of traffic before a connection is cut.
        is_secret: Whether connections use TLS.
        num_updates: The number of updates in a short test.
    """

    transport: Transport
    size: int
    mean_reads: float
    is_secret: bool = False
    num_updates: int = 200


WAYS = {
    "in messages of gRPC": Way(Transport.GRPC, INLINE, 30),
    "uploads over gRPC": Way(Transport.GRPC, LARGE, 80, num_updates=100),
    "in messages on a bulk socket": Way(Transport.BULK, INLINE, 15),
    "a bulk socket": Way(Transport.BULK, LARGE, 25),
    "a Unix socket": Way(Transport.SHARED_MEMORY, INLINE, 15),
    "shared memory": Way(Transport.SHARED_MEMORY, LARGE, 15),
    "gRPC with TLS": Way(Transport.GRPC, INLINE, 30, is_secret=True),
    "a bulk socket with TLS": Way(Transport.BULK, LARGE, 25, is_secret=True, num_updates=100),
}


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@dataclass(frozen=True)
class Network:
    """A way to a server on which connections are cut.

    Attributes:
        connect: Connects by it.
        direct: Connects beside it.
        faults: What has happened.
    """

    connect: Callable[[], gradserve.Client]
    direct: Callable[[], gradserve.Client]
    faults: ConnectionFaults


@contextmanager
def cut(way: Way, certificates: Certificates) -> Iterator[Network]:
    """Yields a network whose connections are cut once parameters were created."""
    tls = certificates.client() if way.is_secret else None
    settings = ConnectionSettings(
        TimeLimits(PATIENCE_SECONDS), NO_RETRIES, transport=way.transport, certificates=client_certificates(tls)
    )
    config = certificates.config() if way.is_secret else ServerConfig(runtime=NOT_WARMED_UP)
    faults = ConnectionFaults(mean_reads=way.mean_reads, seed=11)
    with LocalServer(config) as server, behind(server, way.transport, faults) as (_, address):

        def direct() -> gradserve.Client:
            return gradserve.connect(server.address, transport="grpc", timeout=PATIENCE_SECONDS, tls=tls)

        yield Network(lambda: connect_with(address, settings), direct, faults)


def check(network: Network, name: str, size: int, num_updates: int) -> None:
    """Sends updates over a network, and looks at what has counted."""
    values = np.random.default_rng(5).integers(1, 1 << 13, num_updates).astype(np.float32)  # sums are exact

    def update(number: int) -> dict[str, np.ndarray]:
        array = np.zeros(size, np.float32)
        array[number % size] = values[number]
        return {"w": array}

    with network.direct() as direct:
        parameters = direct.parameters(
            {"w": np.zeros(size, np.float32)},
            shared_name=name,
            optimizer=optim.SGD(1.0),
            update="delta",
            reduction="sum",
            num_required=num_updates,
        )
        with ThreadPoolExecutor(THREADS) as threads:
            sending = [
                threads.submit(_send, network, name, size, range(first, num_updates, THREADS), update)
                for first in range(THREADS)
            ]
            sent = [each.result() for each in sending]
        assert network.faults.happened.total() >= 5
        assert sum(each.acknowledged for each in sent) > num_updates, "some were sent again"
        assert sum(each.uncertain for each in sent) > 0, "some were lost on the way, or their replies were"
        version, weights = parameters.read(), parameters.info().weights
        expected = np.zeros(size, np.float32)
        np.add.at(expected, np.arange(num_updates) % size, values)
        assert version.step == 1
        assert version["w"].tobytes() == expected.tobytes()
        assert (weights.accepted, weights.applied, weights.pending) == (num_updates, num_updates, 0)
        assert len(parameters.rounds()[0].updates) == num_updates


@dataclass
class Sent:
    """The outcome of the attempts to send updates.

    Attributes:
        acknowledged: The attempts that were acknowledged.
        uncertain: Those that failed after the update may have been sent.
    """

    acknowledged: int = 0
    uncertain: int = 0


def _send(
    network: Network, name: str, size: int, numbers: range, update: Callable[[int], dict[str, np.ndarray]]
) -> Sent:
    """Sends some updates, each until it was acknowledged one to four times."""
    chance, sent = random.Random(numbers.start), Sent()
    with network.connect() as client:
        shape = {"w": gradserve.DenseSpec("float32", (size,))}
        parameters = None
        for number in numbers:
            times, wanted, end = 0, 1 + chance.randrange(MOST_SENT), time.monotonic() + PATIENCE_SECONDS
            while times < wanted:
                try:
                    if parameters is None:
                        parameters = client.parameters(shape, shared_name=name, update="delta", reduction="sum")
                    pushed = parameters.push(update(number), 0, request_id=number + 1, worker_id=f"worker {number}")
                except gradserve.UnavailableError as error:
                    if time.monotonic() > end:
                        raise AssertionError(f"update {number} was not acknowledged") from error
                    sent.uncertain += error.request_id is not None
                    time.sleep(PAUSE_SECONDS)
                    continue
                assert pushed.outcome is gradserve.ACCEPTED
                assert pushed.duplicate or not times
                times += 1
            sent.acknowledged += times
    return sent


FEW_WAYS = {"in messages of gRPC", "a bulk socket", "shared memory"}


@pytest.mark.parametrize(
    "way", [pytest.param(each, marks=[] if each in FEW_WAYS else [pytest.mark.exhaustive]) for each in WAYS]
)
def test_cut_connections(way: str, certificates: Certificates, name: str) -> None:
    with cut(WAYS[way], certificates) as network:
        check(network, name, WAYS[way].size, WAYS[way].num_updates)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("way", WAYS)
def test_ten_thousand_updates(way: str, certificates: Certificates, name: str) -> None:
    with cut(WAYS[way], certificates) as network:
        check(network, name, WAYS[way].size, MANY)
