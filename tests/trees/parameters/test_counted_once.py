"""Every update counts once through an aggregator, whichever server is killed, and whichever replies are lost."""

import random
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf.descriptor import MethodDescriptor

import gradserve
from gradserve.testing import ServerProcess
from gradserve_server.config import ServerConfig
from gradserve_server.config.servers import ClusterConfig, UpstreamConfig
from gradserve_server.errors import UnavailableError
from gradserve_server.parts import Parts
from gradserve_server.rpc.boundary.chain import Call, Handle
from gradserve_testing import LocalServer
from tests.cluster.servers import addresses_of
from tests.cluster.sharding.clients import small_pieces
from tests.servers.polling import PATIENCE_SECONDS, eventually
from tests.servers.runtime import NOT_WARMED_UP
from tests.trees.servers import aggregator, aggregator_process
from tests.trees.workers import at_once, clients_of

UPDATES = [{"w": np.full(3, value, np.float32)} for value in (1.0, 2.0, 6.0)]
MEAN = 3.0
VALUES = {"w": np.zeros(3, np.float32)}


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine, a process may take long to start."""
    monkeypatch.setenv("GRADSERVE_RESTART_PATIENCE", str(PATIENCE_SECONDS))


@contextmanager
def tree(folder: Path) -> Iterator[tuple[gradserve.Parameters, ServerProcess, list[gradserve.Parameters]]]:
    """Runs a server, an aggregator in a process, and two workers; yields the parameters as each sees them."""
    with (
        LocalServer(ServerConfig(runtime=NOT_WARMED_UP)) as top,
        gradserve.connect(top.address) as client,
        aggregator_process(folder, top.address) as near,
        clients_of(near.address, 2) as clients,
    ):
        there, *made = [each.parameters(VALUES, shared_name="net", num_required=3) for each in (client, *clients)]
        yield there, near, made


def check(pulls: list[Future[gradserve.PushPull]]) -> None:
    for each in pulls:
        result = each.result()
        assert (result.version.num_updates, result.step, result.version["w"][0]) == (3, 1, MEAN)
        assert (result.outcome, result.weight) == (gradserve.ACCEPTED, 1.0)


def test_an_aggregator_dies_after_it_has_forwarded_a_sum(tmp_path: Path) -> None:
    with tree(tmp_path) as (there, near, made), ThreadPoolExecutor(2) as threads:
        pulls = [threads.submit(each.push_pull, update, 0) for each, update in zip(made, UPDATES, strict=False)]
        eventually(lambda: there.info().num_updates == 2)
        near.restart()
        eventually(lambda: there.info().num_waiting, lambda seen: seen == 2)
        assert not any(each.done() for each in pulls)
        assert there.info().num_updates == 2
        there.push(UPDATES[2], 0)
        check(pulls)
        assert there.info().weights == gradserve.WeightLedger(3.0, 3.0, 0.0, {})


def test_an_aggregator_dies_after_the_answer(tmp_path: Path) -> None:
    """As if the answers had been lost."""
    with tree(tmp_path) as (there, near, made), ThreadPoolExecutor(2) as threads:

        def pull(at: int) -> gradserve.PushPull:
            return made[at].push_pull(UPDATES[at], 0, worker_id=f"w{at}", request_id=1_000_001 + at)

        first = [threads.submit(pull, at) for at in range(2)]
        eventually(lambda: there.info().num_updates == 2)
        there.push(UPDATES[2], 0)
        check(first)
        near.restart()
        again = [threads.submit(pull, at) for at in range(2)]
        assert all(each.result().duplicate for each in again)
        check(again)
        assert (there.info().step, there.info().num_updates) == (1, 0)


def test_pushes_count_once_after_a_restart(tmp_path: Path) -> None:
    with tree(tmp_path) as (there, near, made):

        def push(at: int) -> gradserve.PushResult:
            return made[at].push(UPDATES[at], 0, weight=1.0 + at, worker_id=f"w{at}", request_id=1_000_000 + at)

        assert [(each.duplicate, each.weight) for each in at_once(push, range(2))] == [(False, 1.0), (False, 2.0)]
        near.restart()
        assert [(each.duplicate, each.weight) for each in at_once(push, range(2))] == [(True, 1.0), (True, 2.0)]
        assert (there.info().num_updates, there.info().weights.accepted) == (2, 3.0)


@pytest.mark.parametrize("durability", ["round", "gradient"])
def test_the_server_upstream_is_killed_amid_a_round(tmp_path: Path, durability: str) -> None:
    """Updates that it had acknowledged are there, or are sent again by the workers, which keep them."""
    flags = ("--state-dir", str(tmp_path / "state"), "--durability", durability, "--warm-up", "false")
    with (
        ServerProcess(tmp_path, *flags) as top,
        aggregator(top.address, 2, 1.0) as near,
        clients_of(near.address, 2) as clients,
    ):
        made = [each.parameters(VALUES, shared_name="net", num_required=3) for each in clients]
        at_once(lambda each, update: each.push(update, 0), made, UPDATES[:2])
        top.restart()
        # Each worker learns of the restart by its next call.
        at_once(lambda each: each.info(), made)
        made[0].push(UPDATES[2], 0, worker_id="c")
        version = made[1].read(1, PATIENCE_SECONDS)
        assert (version.num_updates, version["w"][0]) == (3, MEAN)
        assert len(made[0].rounds()[0].updates) == 3


def test_the_server_upstream_is_killed_without_a_state_directory(tmp_path: Path) -> None:
    """The workers are told what is lost, as without an aggregator."""
    with (
        ServerProcess(tmp_path, "--warm-up", "false") as top,
        aggregator(top.address, 2, 1.0) as near,
        clients_of(near.address, 2) as clients,
    ):
        made = [each.parameters(VALUES, shared_name="net", num_required=2) for each in clients]
        at_once(lambda each, update: each.push_pull(update, 0), made, UPDATES[:2])
        top.restart()
        for each in made:
            with pytest.raises(gradserve.LostError, match="has lost parameters"):
                each.info()


class Losing:
    """An interceptor that loses replies, and requests before they arrive."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.num_lost = 0

    def around(self, method: MethodDescriptor, handle: Handle) -> Handle:
        """See `Interceptor`."""
        if method.name not in ("StageUpdate", "Push", "PushPullParameters", "ChangeParameters"):
            return handle

        async def lossy(request: Any, call: Call) -> Any:
            fate = self._random.random()
            if fate < 0.4:
                self.num_lost += 1
            if fate < 0.15:
                raise UnavailableError("the request was lost")
            answer = await handle(request, call)
            if fate < 0.4:
                raise UnavailableError("the reply was lost")
            return answer

        return lossy


@pytest.mark.sampled
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("reduction", ["sum", "median"])
def test_replies_are_lost_on_both_sides_of_the_aggregator(reduction: str, size: int) -> None:
    """Each update is one at its own place, so the version shows those that were lost or counted twice."""
    num_rounds = 12
    above, below = Losing(3), Losing(8)
    places = [ClusterConfig(cluster="train", cluster_size=size, cluster_index=at) for at in range(size)]
    if size == 1:
        places = [ClusterConfig()]
    with ExitStack() as stack:
        stack.enter_context(small_pieces())
        configs = [ServerConfig(runtime=NOT_WARMED_UP, cluster=place) for place in places]
        top = [stack.enter_context(LocalServer(each, Parts(interceptors=(above,)))) for each in configs]
        upstream = ",".join(addresses_of(top))
        config = UpstreamConfig(upstream=upstream, upstream_workers=2, upstream_grace_seconds=0.2)
        near_config = ServerConfig(runtime=NOT_WARMED_UP, upstream=config)
        with (
            LocalServer(near_config, Parts(interceptors=(below,))) as near,
            clients_of(near.address, 2) as clients,
        ):
            how: dict[str, Any] = {"num_required": 2, "reduction": reduction, "sharded": size > 1}
            made = [each.parameters({"w": np.zeros(2)}, shared_name="net", **how) for each in clients]

            def train(number: int) -> None:
                update = np.zeros(2)
                update[number] = 1.0
                for step in range(num_rounds):
                    if step % 2:
                        made[number].push({"w": update}, step, worker_id=f"w{number}")
                        made[number].wait(step + 1, PATIENCE_SECONDS)
                    else:
                        made[number].push_pull({"w": update}, step, worker_id=f"w{number}")

            at_once(train, range(2))
            made[0].change(num_required=1)
            info = made[0].info()
            expected = [1.0, 1.0] if reduction == "sum" else [0.5, 0.5]
            assert made[0].read()["w"].tolist() == [num_rounds * each for each in expected]
            assert info.weights == gradserve.WeightLedger(2.0 * num_rounds, 2.0 * num_rounds, 0.0, {})
            assert all(len(each.updates) == 2 for each in made[0].rounds())
    assert above.num_lost > 5
    assert below.num_lost > 5
