"""Exactly once: whatever the network does, no gradient is lost and none counts twice."""

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import pytest

import gradserve
from gradserve.calls.exchange import TimeLimits
from gradserve.calls.retries import RetryPolicy
from gradserve.testing import ConnectionFault, ConnectionFaults, Faults
from gradserve.transport.settings import ConnectionSettings, Transport
from gradserve_server.config import ServerConfig
from gradserve_server.parts import Parts
from gradserve_testing import LocalServer
from tests.servers.announcing import behind
from tests.servers.connecting import NO_RETRIES, connect_with, without_retries
from tests.servers.held import Held, held_by
from tests.servers.polling import PATIENCE_SECONDS, eventually
from tests.servers.runtime import NOT_WARMED_UP

T = TypeVar("T")

_ATTEMPTS = 200

COUNTING = ("ApplyGradient", "TakeGradient", "PushPull")
"""The methods whose calls must count once."""


class Persistence:
    """Repeats calls with their request_id until they are acknowledged, and counts how often that was needed."""

    def __init__(self) -> None:
        self.repeated = 0
        self._lock = threading.Lock()

    def __call__(self, call: Callable[[int | None], T]) -> T:
        request_id: int | None = None
        for _ in range(_ATTEMPTS):
            try:
                return call(request_id)
            except gradserve.UnavailableError as error:
                # None where the call was not even sent, because its upload failed.
                request_id = error.request_id if error.request_id is not None else request_id
                with self._lock:
                    self.repeated += 1
        raise AssertionError(f"not acknowledged in {_ATTEMPTS} attempts")


@dataclass
class Network:
    """What lies between the clients of a test and the server.

    Attributes:
        address: What clients connect to.
        direct: The server itself.
        settings: Of the clients.
        faults: Of the connections; None where replies are lost in the server.
    """

    address: str
    direct: str
    settings: ConnectionSettings
    num_faults: Callable[[], int]
    faults: ConnectionFaults | None = None
    is_seen: bool = True

    def connect(self) -> gradserve.Client:
        return connect_with(self.address, self.settings)


NETWORKS = {
    "cut connections": (Transport.GRPC, NO_RETRIES),
    "cut connections, the client retries too": (Transport.GRPC, RetryPolicy()),
    "cut bulk sockets": (Transport.BULK, NO_RETRIES),
    "cut bulk sockets, the client retries too": (Transport.BULK, RetryPolicy()),
    "cut Unix sockets": (Transport.SHARED_MEMORY, NO_RETRIES),
    "cut Unix sockets, the client retries too": (Transport.SHARED_MEMORY, RetryPolicy()),
    "lost replies": (Transport.AUTO, NO_RETRIES),
}


@pytest.fixture(
    params=[
        pytest.param(each, marks=[pytest.mark.exhaustive] if each.endswith("retries too") else []) for each in NETWORKS
    ]
)
def network(request: pytest.FixtureRequest) -> Iterator[Network]:
    transport, retries = NETWORKS[request.param]
    settings = ConnectionSettings(TimeLimits(PATIENCE_SECONDS), retries, transport=transport)
    is_seen = retries is NO_RETRIES
    with ExitStack() as stack:
        if request.param == "lost replies":
            replies = Faults()
            lost = replies.drop_reply(*COUNTING, times=None, probability=0.3, seed=21)
            parts = Parts(interceptors=(replies,))
            server = stack.enter_context(LocalServer(ServerConfig(runtime=NOT_WARMED_UP), parts))
            before = held_by(server)
            yield Network(server.address, server.address, settings, lambda: len(lost.happened))
            check_nothing_is_left(server, before)
        else:
            server = stack.enter_context(LocalServer(ServerConfig(runtime=NOT_WARMED_UP)))
            cuts_sockets = transport is not Transport.GRPC
            # A call takes fewer pieces of traffic on a socket.
            faults = ConnectionFaults(mean_reads=10 if cuts_sockets else 20, seed=20)
            before = held_by(server)
            with behind(server, transport, faults) as (_, address):
                yield Network(address, server.address, settings, faults.happened.total, faults, is_seen)
            check_nothing_is_left(server, before)


def check_nothing_is_left(server: LocalServer, before: Held) -> None:
    """Checks that clients that have gone left nothing but accumulators."""
    with gradserve.connect(server.address, transport="grpc", timeout=PATIENCE_SECONDS) as client:
        for each in client.list_accumulators():
            client.delete_accumulator(each.name)
    eventually(lambda: held_by(server), lambda held: held.is_no_more_than(before))


def one_hot(position: int, size: int) -> np.ndarray:
    vector = np.zeros(size, np.float32)
    vector[position] = 1
    return vector


def all_of(futures: list["Future[Any]"]) -> list[Any]:
    return [future.result(PATIENCE_SECONDS) for future in futures]


NUM_APPLIES = 240
NUM_APPLIERS = 6
NUM_TAKERS = 3


@pytest.mark.sampled
@pytest.mark.parametrize("layout", ["dense", "sparse"])
def test_every_applied_gradient_is_taken_once(network: Network, name: str, layout: str) -> None:
    """Gradient i adds 1 at place i, so the sum of all that was taken shows each lost or doubled gradient.

    The last place belongs to gradients that tell takers to stop; they are sent without faults.
    """
    persist = Persistence()
    size = NUM_APPLIES + 1
    stopped: queue.SimpleQueue[int] = queue.SimpleQueue()

    def accumulator(client: gradserve.Client) -> Any:
        if layout == "dense":
            return client.conditional_accumulator("float32", (size,), name, reduction_type="SUM")
        return client.sparse_conditional_accumulator("float32", (size,), name, reduction_type="SUM")

    def apply(acc: Any, place: int, request_id: int | None = None) -> gradserve.ApplyResult:
        gradient = (one_hot(place, size),) if layout == "dense" else ([place], [1.0])
        result: gradserve.ApplyResult = acc.apply_grad(*gradient, local_step=1 << 40, request_id=request_id)
        return result

    def taken_of(acc: Any, num_required: int) -> np.ndarray:
        taken = persist(lambda request_id: acc.take_grad(num_required, timeout=PATIENCE_SECONDS, request_id=request_id))
        if layout == "dense":
            return np.asarray(taken)
        dense = np.zeros(size, np.float32)
        np.add.at(dense, taken.indices, taken.values)
        return dense

    def applier(client: gradserve.Client, places: range) -> None:
        acc = persist(lambda _: accumulator(client))
        for place in places:
            result = persist(partial(apply, acc, place))
            assert result.outcome is gradserve.ACCEPTED

    def taker(number: int) -> np.ndarray:
        total = np.zeros(size, np.float32)
        with network.connect() as client:
            acc = persist(lambda _: accumulator(client))
            while total[-1] == 0:
                total += taken_of(acc, num_required=1 + number)
        stopped.put(number)
        return total

    with ExitStack() as stack:
        threads = stack.enter_context(ThreadPoolExecutor(NUM_APPLIERS + NUM_TAKERS))
        shared = stack.enter_context(network.connect())
        direct = stack.enter_context(gradserve.connect(network.direct, timeout=PATIENCE_SECONDS, transport="grpc"))
        takers = [threads.submit(taker, number) for number in range(NUM_TAKERS)]
        # Two threads call through one client, the others through one of their own.
        clients = [shared, shared] + [stack.enter_context(network.connect()) for _ in range(NUM_APPLIERS - 2)]
        all_of(
            [
                threads.submit(applier, client, range(first, NUM_APPLIES, NUM_APPLIERS))
                for first, client in enumerate(clients)
            ]
        )
        stops = 0
        acc = accumulator(direct)
        running = NUM_TAKERS
        while running:
            persist(lambda request_id: apply(acc, size - 1, request_id))
            stops += 1
            try:
                stopped.get(timeout=0.01)
                running -= 1
            except queue.Empty:
                pass
        total = np.sum(all_of(takers), axis=0)
        # Takers that had stopped already left the last of the stop signals in the round.
        left = acc.num_accumulated()

    assert network.num_faults() >= 10
    assert persist.repeated >= 10 or not network.is_seen
    lost, doubled = np.flatnonzero(total[:-1] < 1), np.flatnonzero(total[:-1] > 1)
    assert (lost.tolist(), doubled.tolist()) == ([], [])
    assert total[-1] + left == stops


@pytest.mark.sampled
@pytest.mark.parametrize("num_floats", [8, 80_000], ids=["inline", "uploaded"])
def test_every_push_pull_is_in_its_round_once(network: Network, name: str, num_floats: int) -> None:
    """Worker w adds round + 1 at place w: an average with every gradient once is the same number everywhere.

    Uploaded gradients are left on the server when a reply is lost; a repeated call must release them.
    """
    num_workers, num_rounds = (4, 30) if num_floats == 8 else (4, 12)
    if network.faults is not None and num_floats > 8 and network.settings.transport is not Transport.SHARED_MEMORY:
        network.faults.mean_reads = 80  # An upload is many reads: some are to succeed.
    persist = Persistence()

    def push_pull(acc: Any, grads: Any, step: int, request_id: int | None) -> gradserve.PushPullResult:
        result: gradserve.PushPullResult = acc.push_pull(
            grads, num_workers, step, timeout=PATIENCE_SECONDS, request_id=request_id
        )
        return result

    def worker(number: int) -> list[gradserve.PushPullResult]:
        results: list[gradserve.PushPullResult] = []
        with network.connect() as client:
            acc = persist(
                lambda _: client.gradient_accumulator({"g": np.zeros(num_floats)}, name, reduction_type="SUM")
            )
            step = 0
            for round_number in range(num_rounds):
                grads = {"g": np.zeros(num_floats)}
                grads["g"][number::num_workers] = round_number + 1
                result = persist(partial(push_pull, acc, grads, step))
                assert result.outcome is gradserve.ACCEPTED
                step = result.step
                assert np.unique(result["g"]).tolist() == [round_number + 1]
                results.append(result)
        return results

    with ThreadPoolExecutor(num_workers) as threads:
        workers = all_of([threads.submit(worker, number) for number in range(num_workers)])
    for results in workers:
        assert [result.step for result in results] == list(range(1, num_rounds + 1))
        assert {result.num_gradients for result in results} == {num_workers}
    assert network.num_faults() >= 10
    assert persist.repeated >= 1 or not network.is_seen


@pytest.mark.parametrize("transport", [Transport.GRPC, Transport.BULK, Transport.SHARED_MEMORY])
def test_the_proxy_does_every_fault(transport: Transport) -> None:
    faults = ConnectionFaults(mean_reads=5, seed=3)
    persist = Persistence()
    with (
        LocalServer(ServerConfig(runtime=NOT_WARMED_UP)) as server,
        behind(server, transport, faults) as (_, address),
        connect_with(address, without_retries(PATIENCE_SECONDS, transport)) as client,
    ):
        while set(faults.happened) < set(ConnectionFault):
            persist(lambda _: client.server_info())
    assert persist.repeated


def test_a_repeated_apply_releases_what_it_uploaded() -> None:
    """The first attempt released its own upload; the repeated call had to upload once more."""
    replies = Faults()
    lost = replies.drop_reply("ApplyGradient", times=2)
    with (
        LocalServer(ServerConfig(runtime=NOT_WARMED_UP), Parts(interceptors=(replies,))) as server,
        connect_with(server.address, without_retries(PATIENCE_SECONDS, Transport.GRPC)) as client,
    ):
        acc = client.conditional_accumulator("float64", (80_000,))
        gradient = np.ones(80_000)
        with pytest.raises(gradserve.UnavailableError) as first:
            acc.apply_grad(gradient)
        with pytest.raises(gradserve.UnavailableError):
            acc.apply_grad(gradient, request_id=first.value.request_id)
        assert lost.happened == ["ApplyGradient"] * 2
        assert acc.num_accumulated() == 1
        assert client.server_info().usage["num_handles"] == 0
