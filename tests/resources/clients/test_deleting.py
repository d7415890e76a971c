"""What clients delete, and what ends when they are closed."""

import math
from concurrent.futures import ThreadPoolExecutor

import pytest

import gradserve
import gradserve.aio
from gradserve.calls.exchange import TimeLimits
from gradserve.testing import FaultyProxy
from gradserve.transport.settings import ConnectionSettings, Transport
from gradserve_server.config import RuntimeConfig, ServerConfig
from gradserve_testing import LocalServer
from tests.resources.clients.aging_server import AgingServer, num_held, num_private
from tests.servers.connecting import connect_with
from tests.servers.polling import PATIENCE_SECONDS, eventually


def test_all_ways_to_delete_are_remembered(server: AgingServer) -> None:
    """A client that makes and deletes for ever does not grow."""
    with gradserve.connect(server.address) as client:
        accumulators = [client.conditional_accumulator("float32") for _ in range(3)]
        layers = [client.batch_norm() for _ in range(3)]
        assert len(client._calls._lease) == 6
        assert accumulators[0].delete()
        client.raw_ops.DestroyResourceOp(resource=accumulators[1])
        assert client.delete_accumulator(accumulators[2].name)
        assert layers[0].delete()
        with layers[1]:
            pass
        assert client.delete_batch_norm_layer(layers[2].name)
        assert len(client._calls._lease) == 0
        assert num_private(server) == 0


def test_deleting_by_name(server: AgingServer) -> None:
    with gradserve.connect(server.address) as client:
        acc = client.conditional_accumulator("float32", shared_name="net", container="run")
        layer = client.batch_norm(scope="net", container="run")
        assert not client.delete_accumulator("net")
        assert not client.delete_batch_norm_layer("net")
        assert client.delete_accumulator("net", container="run")
        assert client.delete_batch_norm_layer("net", container="run")
        assert not client.delete_accumulator("net", "run")
        assert not client.delete_batch_norm_layer("net", "run")
        for look in (acc.info, layer.describe):
            with pytest.raises(gradserve.NotFoundError):
                look()
        for delete in (client.delete_accumulator, client.delete_batch_norm_layer):
            with pytest.raises(gradserve.InvalidArgumentError, match="got an empty one"):
                delete("")
            with pytest.raises(gradserve.InvalidArgumentError, match="expected text"):
                delete(7)  # type: ignore[arg-type]


def test_a_waiting_take_is_told_that_its_client_was_closed(server: AgingServer) -> None:
    """By a call of another thread; that of the closed client itself is over with the client."""
    with gradserve.connect(server.address) as other, ThreadPoolExecutor(1) as threads:
        client = gradserve.connect(server.address)
        handle = client.raw_ops.ConditionalAccumulator(dtype="float32", shape=None)
        waiting = threads.submit(
            lambda: other.raw_ops.AccumulatorTakeGradient(handle=handle, num_required=1, dtype="float32")
        )
        eventually(lambda: server.inspect(lambda server: server.registry.factory.waiters.used) == 1)
        client.close()
        with pytest.raises(gradserve.AbortedError, match="was deleted: it was private to a client that was closed"):
            waiting.result(PATIENCE_SECONDS)
        with pytest.raises(gradserve.NotFoundError, match="any more: it was private to a client that was closed"):
            other.raw_ops.AccumulatorNumAccumulated(handle=handle)


def test_closing_does_not_wait_for_a_silent_server(server: AgingServer) -> None:
    """Nothing but the limit of closing ends a call here."""
    settings = ConnectionSettings(TimeLimits(math.inf, closing=0.3), transport=Transport.GRPC)
    with FaultyProxy(server.address) as proxy:
        client = connect_with(proxy.address, settings)
        client.conditional_accumulator("float32")
        proxy.partition()
        client.close()


def test_a_server_that_shuts_down_does_not_wait_for_those_who_hold(server: AgingServer) -> None:
    """Its drain time is longer than a test may take."""
    with LocalServer(ServerConfig(runtime=RuntimeConfig(warm_up=False, drain_seconds=3600))) as local:
        client = gradserve.connect(local.address)
        client.conditional_accumulator("float32")
        eventually(lambda: num_held(local) == 1)
    client.close()
