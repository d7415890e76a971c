"""Any server that is lost at any stage of a round: of three servers, the home and another one.

With state directories, the round completes with the bits of an undisturbed one. Without, whoever waits gets an average
with these bits or a clear error that can be acted on, and the next round works.
"""

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, TypeVar

import numpy as np
import pytest

import gradserve
from gradserve.calls.accumulators.sharding import wire
from gradserve.calls.accumulators.sharding.shard import LOST_FIELD
from gradserve_server.config.servers import ClusterConfig
from tests.cluster.servers import name_at, running_processes
from tests.cluster.sharding.clients import small_pieces
from tests.cluster.sharding.stages import NUM_SERVERS, STAGES, stopping_client
from tests.servers.polling import PATIENCE_SECONDS
from tests.servers.restarting import RestartingServer

T = TypeVar("T")

HOME, OTHER = 1, 2
MODEL = {
    "kernel": gradserve.DenseSpec("float32", (50, 3)),
    "bias": gradserve.DenseSpec("float64", (7,)),
    "table": gradserve.SparseSpec("float32", (100, 2)),
}
_NUMBERS = itertools.count()
_RETRYABLE = (gradserve.AbortedError, gradserve.LostError, gradserve.DeadlineExceededError)


@pytest.fixture(scope="module", autouse=True)
def pieces() -> Iterator[None]:
    with small_pieces(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "PATIENCE_SECONDS", 0.05)
        patch.setenv("GRADSERVE_RESTART_PATIENCE", str(PATIENCE_SECONDS))
        yield


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Any]]:
    with ExitStack() as stack:
        folder = tmp_path_factory.mktemp("states")
        places = [ClusterConfig(cluster="train", cluster_size=NUM_SERVERS, cluster_index=n) for n in range(NUM_SERVERS)]
        yield [stack.enter_context(RestartingServer(folder / str(each.cluster_index), each)) for each in places]


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Any]]:
    with running_processes(tmp_path_factory.mktemp("processes"), NUM_SERVERS) as found:
        yield found


def _gradient(seed: int) -> dict[str, Any]:
    generator = np.random.default_rng(seed)
    return {
        "kernel": generator.standard_normal((50, 3)).astype(np.float32),
        "bias": generator.standard_normal(7),
        "table": gradserve.IndexedSlices(
            generator.standard_normal((2, 2)).astype(np.float32), np.array([3, 70 + seed])
        ),
    }


def _bits(average: Any) -> dict[str, tuple[bytes, ...]]:
    return {
        name: (value.indices.tobytes(), value.values.tobytes())
        if isinstance(value, gradserve.IndexedSlices)
        else (value.tobytes(),)
        for name, value in average.gradients.items()
    }


def _undisturbed(client: gradserve.Client, first: int, second: int) -> dict[str, tuple[bytes, ...]]:
    """Returns the bits of an average that one server has computed."""
    whole = client.gradient_accumulator(MODEL, sharded=False, durability="none")
    for seed in (first, second):
        whole.apply_grad(_gradient(seed), 0)
    return _bits(whole.take_grad(2))


def _repeated(call: Callable[[int | None], T]) -> T:
    """Makes a call again after its answer was lost, as a program may."""
    try:
        return call(None)
    except gradserve.UnavailableError as error:
        return call(error.request_id)


def _averaged(acc: Any, kind: str, timeout: float) -> Any:
    """Applies the second gradient of a round, and returns its average."""
    how: dict[str, Any] = {"worker_id": "a"}
    if kind == "push_pull":
        return _repeated(lambda number: acc.push_pull(_gradient(1), 2, 0, request_id=number, timeout=timeout, **how))
    _repeated(lambda number: acc.apply_grad(_gradient(1), 0, request_id=number, **how))
    return _repeated(lambda number: acc.take_grad(2, request_id=number, timeout=timeout))


def _next_round(first: Any, second: Any) -> Any:
    """Returns the average of a round that begins after all that was lost."""
    for acc in (first, second):
        try:
            acc.info()
        except gradserve.LostError:
            acc.info()
    if left := first.num_accumulated():
        try:
            first.take_grad(left)
        except gradserve.AbortedError as error:
            _check_is_lost(error)
    step = first.info().global_step
    second.apply_grad(_gradient(4), step, worker_id="b")
    return first.push_pull(_gradient(5), 2, step, worker_id="a")


def _play(cluster: list[Any], stage: str, lost: int, durability: str, kind: str, *, late: bool) -> None:
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
        first = client.gradient_accumulator(MODEL, name, sharded=True, durability=durability)
        second = other.gradient_accumulator(MODEL, name, sharded=True, durability=durability)
        second.apply_grad(_gradient(3), 0, worker_id="b")
        transport.happen = lose
        if durability == "none":
            try:
                average = _averaged(first, kind, 0.3)
            except _RETRYABLE as error:
                _check_is_clear(error, lost)
            else:
                assert _bits(average) == _undisturbed(other, 3, 1)
        else:
            average = _averaged(first, kind, PATIENCE_SECONDS)
            assert _bits(average) == _undisturbed(other, 3, 1)
            assert (average.step, average.num_gradients) == (1, 2)
        assert transport.has_happened
        for comeback in comebacks:
            comeback.join()
        assert _bits(_next_round(first, second)) == _undisturbed(other, 4, 5)
        first.delete()


def _check_is_clear(error: gradserve.GradserveError, lost: int) -> None:
    """Checks that an error says what was lost, or, from a home that has lost a gradient, what is missing."""
    if isinstance(error, gradserve.LostError):
        assert lost == HOME
        assert "durability is none" in str(error)
    elif isinstance(error, gradserve.AbortedError):
        _check_is_lost(error)
        assert f"server {lost} of the cluster has lost gradients of round 1" in str(error)
        assert "Go on with the next one, with local_step=1" in str(error)
    else:
        assert lost == HOME
        assert "did not get the 2 gradients required" in str(error)
        assert "(workers: a;" in str(error)


def _check_is_lost(error: gradserve.AbortedError) -> None:
    assert error.field == LOST_FIELD, error


CELLS = [
    pytest.param(stage, lost, durability, kind, id=f"{stage}-{'home' if lost == HOME else 'other'}-{durability}-{kind}")
    for stage, lost, durability, kind in itertools.product(
        STAGES, (HOME, OTHER), ("gradient", "round", "none"), ("push_pull", "apply and take")
    )
    if not (stage.startswith("accepted") and kind == "push_pull")
    and (durability != "round" or stage.startswith("decided"))  # sharded accumulators have no level between the others
]


@pytest.mark.parametrize(("stage", "lost", "durability", "kind"), CELLS)
def test_a_server_that_is_back_before_the_call_is_made_again(
    servers: list[Any], stage: str, lost: int, durability: str, kind: str
) -> None:
    _play(servers, stage, lost, durability, kind, late=False)


@pytest.mark.parametrize("lost", [HOME, OTHER], ids=["home", "other"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_server_that_is_back_after_calls_were_made_again(servers: list[Any], stage: str, lost: int) -> None:
    kind = "apply and take" if stage.startswith("accepted") else "push_pull"
    _play(servers, stage, lost, "gradient", kind, late=True)


@pytest.mark.parametrize("lost", [HOME, OTHER], ids=["home", "other"])
@pytest.mark.parametrize(
    "stage", ["staged on some", "staged on all", "decided, and the answer lost", "reduced by some"]
)
def test_a_process_that_is_killed(processes: list[Any], stage: str, lost: int) -> None:
    _play(processes, stage, lost, "gradient", "push_pull", late=False)
