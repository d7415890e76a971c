"""Fair shares: whatever one identity takes, another gets something."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import numpy as np
import pytest

import gradserve
from gradserve_protocol.v1 import server_messages_pb2
from gradserve_server.config import LimitsConfig, RuntimeConfig, SecurityConfig, ServerConfig
from gradserve_server.errors import ResourceExhaustedError
from gradserve_server.rpc.boundary.interceptors import FairCalls
from gradserve_server.rpc.listeners.sockets.context import FairSockets
from gradserve_server.security.identity import ANONYMOUS, NO_LIMITS, CallRates, Identity, OwnLimits, ShareRules
from gradserve_testing import LocalServer
from tests.bad_input.requests import Take, ref
from tests.security.serving import TOKENS, entry
from tests.servers.polling import PATIENCE_SECONDS, eventually
from tests.servers.raw_calls import RawCalls, failure_of

MIB = 1 << 20
WORKER, COLLEAGUE = Identity("worker"), Identity("colleague")


def rules_of(reserved: float = 0.0, **limits: OwnLimits) -> ShareRules:
    return ShareRules(reserved, lambda name: limits.get(name, NO_LIMITS))


@pytest.mark.parametrize(("rate", "at_once", "wait"), [(2.0, 2, 0.5), (10.0, 10, 0.1), (0.5, 1, 2.0), (1.5, 1, 1 / 3)])
def test_call_rates(rate: float, at_once: int, wait: float) -> None:
    now = 100.0
    rates = CallRates(lambda: now, rules_of(limited=OwnLimits(calls_per_second=rate)).of_identity)
    limited = Identity("limited")
    for _ in range(2):
        for _ in range(at_once):
            rates.begin(limited)
        with pytest.raises(ResourceExhaustedError, match=f"{rate:g} in a second are allowed") as raised:
            rates.begin(limited)
        assert raised.value.retry_after == pytest.approx(wait)
        for _ in range(20):
            rates.begin(WORKER)
        now += wait
        rates.begin(limited)
        now += 100


def test_calls_that_are_refused_are_under_way_no_longer() -> None:
    calls = FairCalls(max_calls=10, rules=rules_of(0.2, limited=OwnLimits(calls_per_second=1e-6)))
    limited = Identity("limited")
    with calls.call_of(limited):
        for _ in range(100):
            with pytest.raises(ResourceExhaustedError), calls.call_of(limited):
                pass
        with ExitStack() as under_way:
            for _ in range(7):
                under_way.enter_context(calls.call_of(WORKER))
            with pytest.raises(ResourceExhaustedError, match="too many calls under way of 'worker'") as raised:
                under_way.enter_context(calls.call_of(WORKER))
            assert raised.value.retry_after is not None
            under_way.enter_context(calls.call_of(COLLEAGUE))
        with calls.call_of(WORKER):
            pass


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    path: Path = tmp_path_factory.mktemp("access") / "access.toml"
    limits = {
        "chief": "max_handles = 2",
        "idle": "max_calls = 1",
        "visitor": "calls_per_second = 0.001",
        "admin": "max_connections = 1",
    }
    names = ("worker", "colleague", *limits)
    path.write_text(
        "".join(entry(name, {"*": "chief"}, TOKENS[name]) for name in names)
        + "".join(f"[identities.{name}.limits]\n{line}\n" for name, line in limits.items())
        + "[containers.small]\nmax_accumulators = 2\nmax_layers = 1\n"
    )
    config = ServerConfig(
        limits=LimitsConfig.model_validate({"max_bytes": 20 * MIB}),
        runtime=RuntimeConfig(device="cpu", warm_up=False),
        security=SecurityConfig(access=str(path)),
    )
    with LocalServer(config) as server:
        yield server


def connect(local: LocalServer, identity: str) -> gradserve.Client:
    return gradserve.connect(local.address, token=TOKENS[identity], timeout=PATIENCE_SECONDS)


def test_one_identity_cannot_fill_the_memory(local: LocalServer) -> None:
    block = np.zeros(MIB // 4, np.float32)
    with connect(local, "worker") as worker, connect(local, "colleague") as colleague:
        handles = [worker.put(block) for _ in range(18)]
        with pytest.raises(gradserve.ResourceExhaustedError, match="too many bytes of tensor memory of 'worker'"):
            worker.put(block)
        others = colleague.put(block)
        worker.delete(*handles[:2])
        handles[:2] = [worker.put(block)]
        worker.delete(*handles)
        colleague.delete(others)
    assert local.inspect(lambda server: [each.held for each in server.usage.memory.identities.values()]) == [0, 0]


def test_an_identity_has_limits_of_its_own(local: LocalServer) -> None:
    with connect(local, "chief") as chief, connect(local, "worker") as worker:
        first, _ = chief.put(1.0), chief.put(2.0)
        with pytest.raises(gradserve.ResourceExhaustedError, match="tensor handles of 'chief': 1 asked for, 2 in use"):
            chief.put(3.0)
        worker.delete(*[worker.put(3.0) for _ in range(3)])
        chief.delete(first)
        chief.put(3.0)


def test_calls_under_way(local: LocalServer) -> None:
    def refused(calls: RawCalls) -> bool:
        try:
            calls.call("GetServerInfo", server_messages_pb2.GetServerInfoRequest())
        except grpc.RpcError as error:
            failure = failure_of(error)
            assert failure.code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert failure.message == "too many calls under way of 'idle': 1 asked for, 1 in use, 1 allowed"
            return True
        return False

    with connect(local, "worker") as worker, RawCalls(local.address, TOKENS["idle"]) as calls:
        worker.gradient_accumulator({"w": np.zeros(1)}, name="a", shared_name="a")
        waiting = calls.start("TakeGradient", Take(accumulator=ref("a"), num_required=1))
        eventually(lambda: refused(calls))
        waiting.cancel()
        eventually(lambda: not refused(calls))


def test_calls_in_a_second(local: LocalServer) -> None:
    """The client does not wait for longer than the call may take."""
    with gradserve.connect(
        local.address, token=TOKENS["visitor"], timeout=PATIENCE_SECONDS, transport="grpc"
    ) as visitor:
        visitor.server_info()
        with pytest.raises(gradserve.ResourceExhaustedError, match="0.001 in a second are allowed") as raised:
            visitor.server_info()
        assert raised.value.retry_after is not None
        assert PATIENCE_SECONDS < raised.value.retry_after <= 1000


class TestSockets:
    """Clients that get no connection, or no shared memory, go on without."""

    def test_connections(self, local: LocalServer) -> None:
        with connect(local, "admin") as first, connect(local, "admin") as second:
            assert first.server_info().transport.way == "shared_memory"
            transport = second.server_info().transport
            assert transport.way == "grpc"
            assert "too many connections to sockets of 'admin': 1 asked for, 1 in use, 1 allowed" in (
                transport.why_not_faster
            )
        eventually(lambda: local.inspect(lambda server: server.sockets.context.fair.connections.held_by("admin")) == 0)

    def test_shared_memory(self, local: LocalServer) -> None:
        with connect(local, "admin") as admin:
            large = admin.empty((MIB,), np.float32)
            large[:] = 1
            accumulator = admin.gradient_accumulator({"w": np.zeros(MIB, np.float32)})
            accumulator.apply_grad({"w": large})
            assert accumulator.take_grad(1).gradients["w"].sum() == MIB
        # The server learns of the end of a connection a little later.
        eventually(lambda: local.inspect(lambda server: server.sockets.context.fair.region_bytes.used) == 0)


def test_regions_of_an_identity() -> None:
    sockets = FairSockets(10, 100, 100, 10, rules_of(0.2, limited=OwnLimits(max_region_bytes=30)))

    def used() -> tuple[int, int]:
        return sockets.region_bytes.used, sockets.regions.used

    with ExitStack() as regions:

        def add(identity: Identity, num_bytes: int) -> None:
            regions.enter_context(sockets.region(identity, num_bytes, on_gpu=False))

        limited = Identity("limited")
        add(limited, 30)
        with pytest.raises(ResourceExhaustedError, match="shared memory of 'limited': 1 asked for, 30 in use"):
            add(limited, 1)
        add(WORKER, 50)
        with pytest.raises(ResourceExhaustedError, match="of 'worker'"):
            add(WORKER, 1)
        add(COLLEAGUE, 20)
        with pytest.raises(ResourceExhaustedError):
            add(ANONYMOUS, 1)
        assert used() == (100, 3)
    assert used() == (0, 0)
    with sockets.region(limited, 30, on_gpu=False):
        assert used() == (30, 1)


def test_a_container_has_limits_of_its_own(local: LocalServer) -> None:
    with connect(local, "worker") as worker, connect(local, "colleague") as colleague:

        def create(client: gradserve.Client, name: str, container: str = "small") -> None:
            client.gradient_accumulator({"w": np.zeros(1)}, shared_name=name, container=container)

        create(worker, "a")
        create(colleague, "b")
        with pytest.raises(
            gradserve.ResourceExhaustedError,
            match="too many accumulators in the container 'small': 1 asked for, 2 in use, 2 allowed",
        ):
            create(colleague, "c")
        create(colleague, "a")  # exists
        create(colleague, "c", "large")
        worker.delete_accumulator("a", container="small")
        create(colleague, "c")
        colleague.batch_norm(scope="a", container="small")
        with pytest.raises(gradserve.ResourceExhaustedError, match="too many layers in the container 'small'"):
            colleague.batch_norm(scope="b", container="small")
