"""DiLoCo when something fails, is interrupted or comes late: nothing counts twice, and no work is lost."""

import math
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

import gradserve
from gradserve import optim
from gradserve.testing import FaultyProxy
from gradserve.torch import DiLoCo, LocalSGD
from tests.servers.polling import PATIENCE_SECONDS, eventually
from tests.servers.restarting import RestartingServer
from tests.torch.small_models import TwoWeights, Walker
from tests.torch.training_threads import together


class Failing(gradserve.Interceptor):
    """Fails the next calls of a method."""

    def __init__(self, method: str) -> None:
        self._method = method
        self.num_left = 0

    def around_call(self, call: gradserve.CallInfo) -> Any:
        if self.num_left and call.method.endswith(f"/{self._method}"):
            self.num_left -= 1
            raise gradserve.UnavailableError("cut off")
        yield None


def test_a_failed_synchronization_is_made_up_for_and_nothing_counts_twice(
    clients: list[gradserve.Client], name: str
) -> None:
    """The server has counted the update of a call that gave up; what was done since is in the next one."""
    one = Walker(clients[0], name, 1.0, num_required=2, timeout=0.1)
    other = Walker(clients[1], name, 3.0, num_required=2)
    with one.diloco, other.diloco:
        one.walk()
        assert (one.weight, one.diloco.num_failed, one.diloco.version) == (2.0, 1, 0)
        one.walk(1)
        other.walk()  # the round ends with what is in it: 2 and 6
        assert other.weight == 4.0
        one.walk(1)
        assert (one.weight, one.diloco.num_failed, one.diloco.version) == (4.0 + 2.0, 0, 1)
        parameters = clients[0].parameters(shared_name=name)

        def walk_when_the_other_has() -> None:
            eventually(lambda: parameters.info().num_updates == 1)
            one.walk()

        together(walk_when_the_other_has, other.walk)
        assert one.weight == other.weight == pytest.approx(4.0 + (4 * (2.0 + 2.0) + 2 * 6.0) / (4 + 2))
        assert parameters.info().weights.accepted == 2 + 2 + 4 + 2


@pytest.mark.parametrize("codec", [None, "int8"])
def test_a_synchronization_that_was_interrupted_counts_once(
    client: gradserve.Client, name: str, monkeypatch: pytest.MonkeyPatch, codec: str | None
) -> None:
    """Ctrl-C in a notebook, after which training goes on: the next synchronization finds out what became of it."""
    push_pull = gradserve.Parameters.push_pull
    interrupts = [KeyboardInterrupt]

    def interrupted(self: gradserve.Parameters, *args: Any, **options: Any) -> Any:
        result = push_pull(self, *args, **options)
        if interrupts:
            raise interrupts.pop()
        return result

    monkeypatch.setattr(gradserve.Parameters, "push_pull", interrupted)
    walker = Walker(client, name, 1.0, num_required=1, max_staleness=5, codec=codec)
    with walker.diloco as diloco:
        with pytest.raises(KeyboardInterrupt):
            walker.walk()
        walker.walk()
        assert (walker.weight, diloco.version) == (4.0, 2)
    parameters = client.parameters(shared_name=name)
    assert (parameters.read().tree["weight"].item(), parameters.info().weights.accepted) == (4.0, 4)


def test_what_is_done_after_an_interrupted_wait_is_not_lost(
    client: gradserve.Client, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while the worker waits for a synchronization that goes on beside it."""
    result = Future.result
    interrupts = [KeyboardInterrupt]

    def interrupted(self: Any, timeout: float | None = None) -> Any:
        if interrupts and threading.current_thread() is threading.main_thread():
            raise interrupts.pop()
        return result(self, timeout)

    walker = Walker(client, name, 1.0, num_required=1, fragment_sync_delay=1)
    with walker.diloco as diloco:
        monkeypatch.setattr(Future, "result", interrupted)
        with pytest.raises(KeyboardInterrupt):
            walker.walk()
        walker.walk(1)
        assert (walker.weight, diloco.version) == (3.0, 1)
        walker.walk(1)
        assert (walker.weight, diloco.version) == (3.0, 2)  # with a delay, values come without the last step


def test_work_of_a_worker_that_was_cut_off_is_not_lost(
    server_address: str, clients: list[gradserve.Client], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its update comes too late when the network is back, and is in the next one."""
    monkeypatch.setenv("GRADSERVE_RESTART_PATIENCE", "0")
    with FaultyProxy(server_address) as network, gradserve.connect(network.address, transport="grpc") as client:
        cut_off = Walker(client, name, 1000.0, num_required=1)
        other = Walker(clients[0], name, 1.0, num_required=1)
        with cut_off.diloco as diloco, other.diloco:
            cut_off.walk(1)
            network.cut()
            cut_off.walk(1)
            assert (cut_off.weight, diloco.num_failed) == (2000.0, 1)
            other.walk(4)
            network.heal()
            cut_off.walk(2)
            assert (cut_off.weight, diloco.num_failed, diloco.version) == (4.0 + 4000.0, 0, 2)
            cut_off.walk(2)
            assert (cut_off.weight, diloco.version) == (4.0 + 6000.0, 3)
        record = clients[0].parameters(shared_name=name).rounds()[-1]
        assert record.updates[0].weight_asked == 6


def test_a_worker_that_goes_back_after_a_failure(clients: list[gradserve.Client], name: str) -> None:
    one = Walker(clients[0], name, 1.0, num_required=2, timeout=0.1, on_failure="reset")
    with one.diloco:
        one.walk()
        assert (one.weight, one.diloco.num_failed) == (0.0, 1)


def test_a_worker_goes_on_after_values_that_the_server_refuses(clients: list[gradserve.Client], name: str) -> None:
    """Its next update is of the values that it has then, with the work since the last one that counted."""
    walker = Walker(clients[0], name, math.nan, num_required=1)
    with walker.diloco as diloco:
        with pytest.raises(gradserve.InvalidArgumentError, match="finite"):
            walker.walk()
        walker.speed = 1.0
        torch.nn.init.zeros_(walker.model.weight)
        walker.walk()
        assert (walker.weight, diloco.version) == (2.0, 1)
    (record,) = clients[0].parameters(shared_name=name).rounds()
    assert record.updates[0].weight_asked == 4


def test_a_fragment_that_the_server_refuses(client: gradserve.Client, name: str) -> None:
    """The values of the other fragment, which was synchronized, come with the next synchronization."""
    model = TwoWeights()
    inner = torch.optim.SGD(model.parameters(), lr=1.0)

    def walk(*speeds: float) -> None:
        for parameter, speed in zip(model.parameters(), speeds, strict=True):
            parameter.grad = torch.full_like(parameter, -speed)
        inner.step()

    given: dict[str, Any] = {"sync_every": 4, "outer_optimizer": optim.SGD(0.5), "num_required": 1, "fragments": 2}
    with DiLoCo(client, model, inner, name=name, **given) as diloco:
        walk(2.0, math.nan)
        with pytest.raises(gradserve.InvalidArgumentError, match="finite"):
            diloco.sync()
        torch.nn.init.ones_(model.layers[1].weight)
        walk(1.0, 1.0)
        diloco.sync()
        assert model.values() == [(1.0 + 2.0 / 2) + 1.0 / 2, 1.0 + 1.0 / 2]


def test_buffers_beside_parameters_that_the_server_refuses(client: gradserve.Client, name: str) -> None:
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    model.register_buffer("seen", torch.zeros(1))
    inner = torch.optim.SGD(model.parameters(), lr=1.0)

    def walk(speed: float, steps: int = 2) -> None:
        for _ in range(steps):
            model.weight.grad = torch.full_like(model.weight, -speed)
            model.seen += 1
            inner.step()

    with LocalSGD(client, model, inner, sync_every=2, name=name, num_required=1, buffers="mean") as diloco:
        with pytest.raises(gradserve.InvalidArgumentError, match="finite"):
            walk(math.nan)
        torch.nn.init.zeros_(model.weight)
        walk(1.0)
        assert (model.weight.item(), model.seen.item(), diloco.version) == (2.0, 4.0, 1)
    assert client.parameters(shared_name=f"{name}/buffers").info().step == 2


def test_an_update_that_is_too_late(clients: list[gradserve.Client], name: str) -> None:
    slow = Walker(clients[0], name, 1000.0, num_required=1)
    fast = Walker(clients[1], name, 1.0, num_required=1)
    with slow.diloco, fast.diloco:
        fast.walk(6)
        slow.walk()
        assert (slow.weight, slow.diloco.version, slow.diloco.step) == (6.0, 3, 6)


def test_an_update_that_is_late_but_counts(clients: list[gradserve.Client], name: str) -> None:
    slow, fast = (
        Walker(each, name, speed, num_required=1, max_staleness=5)
        for each, speed in zip(clients, (1000.0, 1.0), strict=True)
    )
    with slow.diloco, fast.diloco:
        fast.walk(6)
        slow.walk()
        assert (slow.weight, slow.diloco.version, slow.diloco.step) == (2006.0, 4, 8)


def test_a_server_that_has_lost_its_state(tmp_path: Path, name: str) -> None:
    with RestartingServer(tmp_path) as server, gradserve.connect(server.address, timeout=PATIENCE_SECONDS) as client:
        walker = Walker(client, name, 1.0, num_required=1, durability="none")
        with walker.diloco as diloco:
            walker.walk(5)
            server.restart()
            walker.walk(1)
            assert (walker.weight, diloco.version, diloco.num_failed) == (6.0, 2, 1)
            walker.walk(2)
            assert (walker.weight, diloco.version, diloco.num_failed) == (8.0, 3, 0)
        assert client.parameters(shared_name=name).read().tree["weight"].item() == 8.0


def test_a_server_that_has_lost_its_state_and_is_gone_again(tmp_path: Path, name: str) -> None:
    """The worker trains on, and begins again when the server is back."""
    with (
        RestartingServer(tmp_path) as server,
        gradserve.connect(
            server.address, timeout=PATIENCE_SECONDS, interceptors=[cut := Failing("CreateParameters")]
        ) as client,
    ):
        walker = Walker(client, name, 1.0, num_required=1, durability="none")
        with walker.diloco as diloco:
            walker.walk(5)
            server.restart()
            cut.num_left = 1
            walker.walk(1)
            assert (walker.weight, diloco.version, diloco.num_failed) == (6.0, 2, 1)
            walker.walk(2)
            assert (walker.weight, diloco.version, diloco.num_failed) == (8.0, 2, 2)
            walker.walk(2)
            assert (walker.weight, diloco.version, diloco.num_failed) == (10.0, 3, 0)
        assert client.parameters(shared_name=name).read().tree["weight"].item() == 10.0


def test_an_update_that_counted_is_not_pushed_again_because_the_newest_version_cannot_be_read(
    server_address: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    push_pull = gradserve.Parameters.push_pull
    lost = [gradserve.LostError("lost")]

    def lose_one(self: gradserve.Parameters, *args: Any, **options: Any) -> Any:
        if lost:
            raise lost.pop()
        return push_pull(self, *args, **options)

    monkeypatch.setattr(gradserve.Parameters, "push_pull", lose_one)
    with gradserve.connect(server_address, interceptors=[cut := Failing("ReadParameters")]) as client:
        walker = Walker(client, name, 1.0, num_required=1, max_staleness=5)
        with walker.diloco as diloco:
            cut.num_left = 2  # as it begins again, and after its update has counted
            walker.walk(4)
            assert (walker.weight, diloco.version, diloco.num_failed, cut.num_left) == (4.0, 0, 2, 0)
            walker.walk(2)
            assert (walker.weight, diloco.version, diloco.num_failed) == (6.0, 1, 0)
            walker.walk(2)
            assert (walker.weight, diloco.version) == (8.0, 2)
        assert client.parameters(shared_name=name).read().tree["weight"].item() == 8.0


def test_a_server_that_starts_again_with_its_state(tmp_path: Path, name: str) -> None:
    with RestartingServer(tmp_path) as server, gradserve.connect(server.address, timeout=PATIENCE_SECONDS) as client:
        walker = Walker(client, name, 1.0, num_required=1, durability="round")
        with walker.diloco as diloco:
            walker.walk(5)
            server.restart()
            walker.walk(1)
            assert (walker.weight, diloco.version, diloco.num_failed) == (6.0, 3, 0)
