"""Any server that is lost at any stage of a round of sharded parameters: of three servers, the home and another one.

With state directories, the round completes, and every version has the bits of an undisturbed run. Without, whoever has
a part in it gets a clear error; what is left can be deleted, and made again.
"""

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, TypeVar

import numpy as np
import pytest

import gradserve
from gradserve import optim, reductions
from gradserve_server.config.servers import ClusterConfig
from tests.cluster.servers import name_at, running_processes
from tests.cluster.sharding.clients import small_pieces
from tests.cluster.sharding.stages import NUM_SERVERS, Stage, stopping_client
from tests.servers.polling import PATIENCE_SECONDS
from tests.servers.restarting import RestartingServer

T = TypeVar("T")

HOME, OTHER = 1, 2
VALUES: dict[str, Any] = {
    "kernel": np.ones((50, 3), np.float32),
    "bias": np.zeros(7),
    "scale": np.ones((9, 2), np.float16),
}
RULES: dict[str, Any] = {"optimizer": optim.SGD(0.1, momentum=0.9), "update": "gradient", "num_required": 2}
KINDS: dict[str, dict[str, Any]] = {
    "push_pull": RULES,
    "push and read": RULES | {"reduction": reductions.geometric_median(), "clip_norm": 5.0},
}
"""The calls that get a version, and the properties with which they are made."""
STAGES = {
    "before staging": Stage(["StageUpdate"]),
    "staged on some": Stage(["StageUpdate"], 1),
    "staged on all": Stage(["Push", "PushPullParameters"]),
    "accepted": Stage(["Push"], 1),
    "accepted, and the answer lost": Stage(["Push"], 1, loses_answer=True),
    "decided": Stage(["PushPullParameters"], 1),
    "decided, and the answer lost": Stage(["PushPullParameters"], 1, loses_answer=True),
    "made by some": Stage(["ReadParameters"], 1),
    "made by all, and the answer lost": Stage(["ReadParameters"], NUM_SERVERS, loses_answer=True),
}
_NUMBERS = itertools.count()


@pytest.fixture(scope="module", autouse=True)
def pieces() -> Iterator[None]:
    with small_pieces(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRADSERVE_RESTART_PATIENCE", str(PATIENCE_SECONDS))
        yield


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Any]]:
    folder = tmp_path_factory.mktemp("states")
    with ExitStack() as stack:
        yield [stack.enter_context(RestartingServer(folder / str(place.cluster_index), place)) for place in _places()]


@pytest.fixture
def forgetful() -> Iterator[list[Any]]:
    with ExitStack() as stack:
        yield [stack.enter_context(RestartingServer(None, place)) for place in _places()]


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Any]]:
    with running_processes(tmp_path_factory.mktemp("processes"), NUM_SERVERS) as found:
        yield found


def _places() -> list[ClusterConfig]:
    return [ClusterConfig(cluster="train", cluster_size=NUM_SERVERS, cluster_index=n) for n in range(NUM_SERVERS)]


def _update(seed: int) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    return {name: random.standard_normal(value.shape).astype(value.dtype) for name, value in VALUES.items()}


def _undisturbed(client: gradserve.Client, kind: str = "push_pull") -> list[str]:
    """Returns the digests of three rounds on one server."""
    whole = client.parameters(VALUES, durability="none", **KINDS[kind])
    digests = []
    for step in range(3):
        whole.push(_update(2 * step), step, worker_id="b")
        digests.append(whole.push_pull(_update(2 * step + 1), step, worker_id="a").version.digest)
    return digests


def _repeated(call: Callable[[int | None], T]) -> T:
    """Makes a call again after its answer was lost, as a program may."""
    try:
        return call(None)
    except gradserve.UnavailableError as error:
        return call(error.request_id)


def _round(first: Any, second: Any, step: int, kind: str) -> str:
    """Plays a round of two workers; returns the digest of its version."""
    second.push(_update(2 * step), step, worker_id="b")
    update = _update(2 * step + 1)
    if kind == "push_pull":
        pulled = _repeated(lambda number: first.push_pull(update, step, worker_id="a", request_id=number))
        return str(pulled.version.digest)
    _repeated(lambda number: first.push(update, step, worker_id="a", request_id=number))
    return str(_repeated(lambda _: first.read(step + 1)).digest)


def _play(cluster: list[Any], stage: str, lost: int, kind: str, *, late: bool) -> None:
    addresses = [each.address for each in cluster]
    name = name_at(HOME, NUM_SERVERS, f"net{next(_NUMBERS)}-")
    client, transport = stopping_client(addresses, STAGES[stage])
    comebacks: list[threading.Timer] = []

    def lose() -> None:
        cluster[lost].stop()
        if late:
            comebacks.append(threading.Timer(0.25, cluster[lost].start))
            comebacks[0].start()
        else:
            cluster[lost].start()

    with client, gradserve.connect(addresses, timeout=PATIENCE_SECONDS) as other:
        first = client.parameters(VALUES, name, sharded=True, durability="gradient", **KINDS[kind])
        second = other.parameters(VALUES, name, sharded=True, durability="gradient", **KINDS[kind])
        transport.happen = lose
        found = [_round(first, second, step, kind) for step in range(3)]
        assert transport.has_happened
        for comeback in comebacks:
            comeback.join()
        assert found == _undisturbed(other, kind)
        ledger = first.info().weights
        assert (ledger.accepted, ledger.applied, ledger.pending) == (6.0, 6.0, 0.0)
        first.delete()


CELLS = [
    pytest.param(stage, lost, kind, id=f"{stage}-{'home' if lost == HOME else 'other'}-{kind}")
    for stage, lost, kind in itertools.product(STAGES, (HOME, OTHER), ("push_pull", "push and read"))
    if not (stage.startswith("accepted") and kind == "push_pull")
    and not (stage.startswith("decided") and kind == "push and read")
]


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(("stage", "lost", "kind"), CELLS)
def test_a_server_that_is_back_before_the_call_is_made_again(
    servers: list[Any], stage: str, lost: int, kind: str
) -> None:
    _play(servers, stage, lost, kind, late=False)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("lost", [HOME, OTHER], ids=["home", "other"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_server_that_is_back_after_calls_were_made_again(servers: list[Any], stage: str, lost: int) -> None:
    kind = "push and read" if stage.startswith("accepted") else "push_pull"
    _play(servers, stage, lost, kind, late=True)


@pytest.mark.exhaustive
@pytest.mark.parametrize("lost", [HOME, OTHER], ids=["home", "other"])
@pytest.mark.parametrize("stage", ["staged on some", "staged on all", "decided, and the answer lost", "made by some"])
def test_a_process_that_is_killed(processes: list[Any], stage: str, lost: int) -> None:
    _play(processes, stage, lost, "push_pull", late=False)


@pytest.mark.parametrize("lost", [HOME, OTHER], ids=["home", "other"])
def test_a_server_without_a_state_directory_is_named(forgetful: list[Any], lost: int) -> None:
    """Nobody gets values of another step or of nobody; what is left is deleted, and made again."""
    addresses = [each.address for each in forgetful]
    name = name_at(HOME, NUM_SERVERS)
    with gradserve.connect(addresses, timeout=PATIENCE_SECONDS) as client:
        parameters = client.parameters(VALUES, name, sharded=True, **RULES)
        _round(parameters, parameters, 0, "push_pull")
        forgetful[lost].stop()
        forgetful[lost].start()
        for call in (parameters.read, lambda: parameters.push(_update(1), 1, worker_id="a")):
            with pytest.raises((gradserve.LostError, gradserve.NotFoundError)) as error:
                call()
            assert lost == HOME or f"server {lost} of the cluster was started again" in str(error.value)
        client.delete_parameters(name)
        again = client.parameters(VALUES, name, sharded=True, **RULES)
        assert [_round(again, again, step, "push_pull") for step in range(3)] == _undisturbed(client)


def test_a_saved_version_brings_a_lost_shard_back(forgetful: list[Any], tmp_path: Any) -> None:
    addresses = [each.address for each in forgetful]
    with gradserve.connect(addresses, timeout=PATIENCE_SECONDS) as client:
        parameters = client.parameters(VALUES, name_at(HOME, NUM_SERVERS), sharded=True, **RULES)
        first = _round(parameters, parameters, 0, "push_pull")
        parameters.save(tmp_path / "saved.safetensors")
        _round(parameters, parameters, 1, "push_pull")
        forgetful[OTHER].stop()
        forgetful[OTHER].start()
        with pytest.raises(gradserve.LostError, match="load a saved version"):
            parameters.read()
        step = parameters.load(tmp_path / "saved.safetensors").step
        assert (step, parameters.read().digest) == (3, first)
        assert parameters.rounds()[-1].reason == "loaded"
        parameters.push(_update(2), step, worker_id="b")
        pulled = parameters.push_pull(_update(3), step, worker_id="a").version
        assert pulled.digest == _undisturbed(client)[1]
