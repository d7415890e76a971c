"""Parameters on a server, as users of the client see them."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradserve
import gradserve.aio
from gradserve import optim
from gradserve.transport.settings import TransportName
from gradserve_protocol.arrays import BFLOAT16
from gradserve_protocol.digest import digest_of
from tests.servers.polling import PATIENCE_SECONDS, eventually
from tests.servers.restarting import RestartingServer

WAYS: tuple[TransportName, ...] = ("shared_memory", "bulk", "grpc")
W = np.arange(6, dtype=np.float32).reshape(2, 3)
VALUES = {"w": W, "layers": [np.ones(2), np.full(3, 0.5, BFLOAT16)]}
LARGE = 1 << 20


def as_lists(version: gradserve.Version) -> dict[str, Any]:
    return {name: value.tolist() for name, value in version.items()}


@pytest.mark.parametrize("way", WAYS)
def test_sgd_of_rate_one_on_deltas_makes_the_weighted_mean(server_address: str, name: str, way: TransportName) -> None:
    """A wrong sign anywhere would show here."""
    with gradserve.connect(server_address, transport=way) as client:
        parameters = client.parameters(VALUES, shared_name=name, num_required=2, optimizer=optim.SGD(1.0))
        base = parameters.read()
        locals_ = [W + 1, W * 3]
        assert parameters.push({"w": locals_[0] - base["w"]}, base, worker_id="a").num_updates == 1
        result = parameters.push_pull({"w": locals_[1] - base["w"]}, base, weight=3.0, worker_id="b")
        assert (result.outcome, result.step, result.staleness) == (gradserve.ACCEPTED, 1, 0)
        assert result.version["w"].tolist() == ((locals_[0] + 3 * locals_[1]) / 4).tolist()
        assert result.version["layers/1"].tolist() == [0.5] * 3
        assert (result.version.num_updates, result.version.total_weight) == (2, 4.0)
        assert set(result.version.worker_ids) == {"a", "b"}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("copy", [True, False])
def test_large_parameters_travel_every_way(server_address: str, name: str, way: TransportName, copy: bool) -> None:
    with gradserve.connect(server_address, transport=way) as client:
        values, stored = np.linspace(0, 1, LARGE), len(client.list_tensors())
        parameters = client.parameters({"w": values}, shared_name=name)
        version = parameters.push_pull({"w": np.full(LARGE, 0.25)}, 0, copy=copy).version
        assert np.array_equal(version["w"], values + 0.25)
        assert version.digest == digest_of([values + 0.25]).hex() == parameters.info().digest
        assert version["w"].flags.writeable == copy
        del version
        assert len(client.list_tensors()) == stored
        parameters.delete()


def test_versions_have_the_digest_of_their_bytes(client: gradserve.Client, name: str) -> None:
    parameters = client.parameters(VALUES, shared_name=name)
    for step in range(3):
        version = parameters.read(step)
        assert version.digest == digest_of(version.components.values()).hex()
        parameters.push({"layers": [None, [0.1, 0.2, 0.3]], "w": W}, version)
    assert [each.digest_after for each in parameters.rounds()][:2] == [
        each.digest_before for each in parameters.rounds()
    ][1:]


def test_rounding_down_does_not_accumulate(client: gradserve.Client, name: str) -> None:
    """Readers see bfloat16, but 256 steps of 2^-9 are half a unit, and each alone is lost in rounding."""
    parameters = client.parameters({"w": np.ones(3, BFLOAT16)}, shared_name=name)
    for step in range(256):
        parameters.push({"w": np.full(3, 2**-9, BFLOAT16)}, step)
    assert parameters.read()["w"].tolist() == [1.5] * 3


@pytest.mark.parametrize(
    ("values", "options", "match"),
    [
        ({"v": W, "w": W}, {}, "'v'"),
        ({"w": W, "b": np.ones(3)}, {"max_staleness": 3}, "shape"),
        ({"w": W, "b": np.ones(2, np.float32)}, {"max_staleness": 3}, "float"),
        ({"w": W, "b": np.ones(2)}, {"max_staleness": 3}, "constant up to 0, not constant up to 3"),
        ({"w": W, "b": np.ones(2)}, {"update": "gradient", "optimizer": optim.SGD(0.1)}, "update"),
        ({"w": W, "b": np.ones(2)}, {"agreement": {"a": "b"}}, "agreement"),
        ({"w": W, "b": np.ones(2)}, {"clip_norm": 1.0}, "clip_norm"),
    ],
)
def test_others_must_agree_on_names_then_shapes_then_properties(
    client: gradserve.Client, name: str, values: Any, options: dict[str, Any], match: str
) -> None:
    client.parameters({"w": W, "b": np.ones(2)}, shared_name=name)
    with pytest.raises(gradserve.AlreadyExistsError, match=match):
        client.parameters(values, shared_name=name, **options)


def test_rules_may_differ(client: gradserve.Client, name: str) -> None:
    client.parameters({"w": W}, shared_name=name, num_required=2)
    other = client.parameters({"w": W + 1}, shared_name=name, num_required=5, grace=3, optimizer=optim.Adam())
    assert other.info().rules.num_required == 2
    assert other.read()["w"].tolist() == W.tolist()


def test_only_shapes(client: gradserve.Client, name: str) -> None:
    shapes = {"w": gradserve.DenseSpec("float32", (2, 3))}
    with pytest.raises(gradserve.NotFoundError, match="only shapes"):
        client.parameters(shapes, shared_name=name)
    client.parameters({"w": W}, shared_name=name)
    assert client.parameters(shapes, shared_name=name).read()["w"].tolist() == W.tolist()


@pytest.mark.parametrize("way", WAYS)
def test_one_of_many_creators_sends_its_values(server_address: str, name: str, way: TransportName) -> None:
    together = threading.Barrier(8)

    def create(number: int) -> tuple[int, str]:
        sent = [0]
        with gradserve.connect(server_address, transport=way) as other:
            together.wait(PATIENCE_SECONDS)
            values = {"w": np.full(LARGE, float(number))}
            made = other.parameters(values, shared_name=name, progress=lambda done, _: sent.append(done))
            return max(sent), made.info().digest

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(create, range(8)))
    assert sorted(sent for sent, _ in found) == [0] * 7 + [8 * LARGE]
    assert len({digest for _, digest in found}) == 1


def test_the_name_alone(client: gradserve.Client, server_address: str, name: str) -> None:
    with gradserve.connect(server_address) as other:
        with pytest.raises(gradserve.NotFoundError, match="create them with values"):
            other.parameters(shared_name=name)
        made = client.parameters(VALUES, shared_name=name, num_required=2, optimizer=optim.Adam(), max_staleness=3)
        found = other.parameters(shared_name=name)
        assert found.info() == made.info()
        assert as_lists(found.read()) == as_lists(made.read())
        made.push({"w": W}, 0)
        assert found.push_pull({"w": W}, 0).version.digest == made.read().digest


def test_the_private_parameters_of_others_have_no_name(client: gradserve.Client, server_address: str) -> None:
    private = client.parameters(VALUES)
    with gradserve.connect(server_address) as other, pytest.raises(gradserve.NotFoundError, match="private"):
        other.parameters(shared_name=private.name)


def test_an_update_counts_once(client: gradserve.Client, name: str) -> None:
    parameters = client.parameters({"w": W}, shared_name=name, num_required=3)
    first = parameters.push({"w": W}, 0, request_id=7, worker_id="a")
    again = parameters.push({"w": W}, 0, request_id=7, worker_id="a")
    assert (first.duplicate, again.duplicate, again.weight) == (False, True, first.weight)
    second = parameters.push({"w": W}, 0, worker_id="a")
    assert second.outcome is gradserve.Outcome.ALREADY_COUNTED
    assert parameters.info().num_updates == 1


def test_stale_updates(client: gradserve.Client, name: str) -> None:
    parameters = client.parameters({"w": W}, shared_name=name, max_staleness=1, staleness="inverse_sqrt")
    for step in range(2):
        parameters.push({"w": W}, step)
    late = parameters.push({"w": W}, 1, weight=2.0)
    assert (late.outcome, late.staleness, parameters.info().step) == (gradserve.ACCEPTED, 1, 3)
    assert late.weight == pytest.approx(2**0.5)
    stale = parameters.push_pull({"w": W}, 0)
    assert (stale.outcome, stale.weight, stale.step) == (gradserve.STALE, 0.0, 3)
    assert stale.version.digest == parameters.read().digest
    with pytest.raises(gradserve.InvalidArgumentError, match="future|local_step") as raised:
        parameters.push({"w": W}, 4)
    assert raised.value.field == "local_step"


@pytest.mark.parametrize(
    ("update", "options", "field"),
    [
        ({"w": W.T}, {}, "update"),
        ({"w": np.full((2, 3), np.nan, np.float32)}, {}, "update"),
        ({"w": W}, {"weight": 1e38}, "weight"),
        ({"w": W}, {"worker_id": "x" * 300}, "worker_id"),
    ],
)
def test_bad_updates(client: gradserve.Client, name: str, update: Any, options: dict[str, Any], field: str) -> None:
    parameters = client.parameters({"w": W}, shared_name=name)
    with pytest.raises(gradserve.InvalidArgumentError) as raised:
        parameters.push(update, 0, **options)
    assert (raised.value.field or "").startswith(field)
    assert parameters.info().step == 0


def test_every_call_that_waits_for_a_version_counts(client: gradserve.Client, name: str) -> None:
    parameters = client.parameters({"w": W}, shared_name=name, num_required=2)
    assert parameters.info().num_waiting == 0
    with ThreadPoolExecutor(3) as pool:
        waiting: list[Future[Any]] = [
            pool.submit(parameters.push_pull, {"w": W}, 0, worker_id="a", timeout=PATIENCE_SECONDS),
            pool.submit(parameters.read, 1, timeout=PATIENCE_SECONDS),
            pool.submit(parameters.wait, 1, timeout=PATIENCE_SECONDS),
        ]
        eventually(lambda: parameters.info().num_waiting, lambda seen: seen == 3)
        (status,) = client.server_status(name_contains=name, max_accumulators=1).parameters
        assert status.num_waiting == 3
        parameters.push({"w": W}, 0, worker_id="b")
        for each in waiting:
            each.result(PATIENCE_SECONDS)
    assert parameters.info().num_waiting == 0


def test_waiting_for_a_step(client: gradserve.Client, name: str) -> None:
    parameters = client.parameters({"w": W}, shared_name=name)
    with ThreadPoolExecutor(2) as threads:
        reading, waiting = threads.submit(parameters.read, 2, 60), threads.submit(parameters.wait, 2, 60)
        for step in range(2):
            parameters.push({"w": W}, step)
        assert reading.result(PATIENCE_SECONDS)["w"].tolist() == (3 * W).tolist()
        assert waiting.result(PATIENCE_SECONDS) is None
    parameters.push({"w": W}, 2)
    parameters.wait(0)
    with pytest.raises(gradserve.OutOfRangeError):
        parameters.read(0)
    with pytest.raises(gradserve.DeadlineExceededError):
        parameters.read(9, timeout=0)


def run_rounds(parameters: gradserve.Parameters, steps: range) -> str:
    version = parameters.read()
    for step in steps:
        update = {name: np.full(value.shape, 0.01 * (step + 1)) for name, value in version.items()}
        version = parameters.push_pull(update, version).version
    return version.digest


@pytest.mark.parametrize(
    "optimizer",
    [
        optim.SGD(0.7, momentum=0.9, nesterov=True),
        optim.AdamW(0.01),
        optim.Adagrad(0.1),
        optim.Yogi(0.01),
        optim.flower.FedAdam(),
    ],
    ids=lambda each: type(each).__name__,
)
def test_a_saved_run_goes_on_with_the_same_bits(
    client: gradserve.Client, name: str, tmp_path: Path, optimizer: optim.Optimizer
) -> None:
    options: dict[str, Any] = {"optimizer": optimizer, "schedule": optim.cosine(8, warmup=2)}
    whole = client.parameters(VALUES, shared_name=f"{name}-whole", **options)
    expected = run_rounds(whole, range(6))
    part = client.parameters(VALUES, shared_name=f"{name}-part", **options)
    run_rounds(part, range(3))
    assert part.save(tmp_path / "run") == 3
    run_rounds(part, range(50, 52))
    loaded = client.parameters(gradserve.load_parameters(tmp_path / "run"), shared_name=f"{name}-loaded")
    assert (loaded.read().step, loaded.info().optimizer) == (3, optimizer)
    assert run_rounds(loaded, range(3, 6)) == expected
    assert part.load(tmp_path / "run").step == 6
    assert run_rounds(part, range(3, 6)) == expected
    fork = whole.fork(shared_name=f"{name}-fork")
    assert run_rounds(fork, range(6, 8)) == run_rounds(whole, range(6, 8))


def test_changes(client: gradserve.Client, name: str) -> None:
    parameters = client.parameters({"w": W}, shared_name=name, num_required=3, deadline=9.0)
    parameters.push({"w": W}, 0)
    info = parameters.change(num_required=1, optimizer=optim.SGD(0.5), grace="adaptive")
    assert info.rules == gradserve.RoundRules(1, None, None, "adaptive", 60.0, 0.0, 9.0)
    assert info.optimizer == optim.SGD(0.5)


def test_records(client: gradserve.Client, name: str) -> None:
    parameters = client.parameters({"w": W}, shared_name=name, max_staleness=5)
    for number in range(5):
        parameters.push({"w": W}, 0, weight=number + 1, worker_id=f"worker {number}")
    records = parameters.rounds()
    assert [each.step for each in records] == [1, 2, 3, 4, 5]
    assert [(each.updates[0].worker_id, each.updates[0].weight_asked) for each in records] == [
        (f"worker {number}", number + 1) for number in range(5)
    ]
    assert [each.updates[0].staleness for each in records] == [0, 1, 2, 3, 4]
    assert {each.reason for each in records} == {"required"}
    assert [each.step for each in parameters.rounds(3)] == [4, 5]
    weights = parameters.info().weights
    assert (weights.accepted, weights.applied, weights.pending) == (15.0, 15.0, 0.0)


def test_private_parameters_end_with_their_client(server_address: str, client: gradserve.Client) -> None:
    with gradserve.connect(server_address) as other:
        private = other.parameters({"w": W}, name="private")
        assert private.info().is_private
        assert private.name in [each.name for each in client.list_parameters()]
    assert private.name not in [each.name for each in client.list_parameters()]


def test_deleted_parameters(client: gradserve.Client, name: str) -> None:
    parameters = client.parameters({"w": W}, shared_name=name)
    is_waiting = threading.Event()

    def wait() -> None:
        is_waiting.set()
        parameters.wait(9, 60)

    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(wait)
        is_waiting.wait()
        assert client.delete_parameters(name)
        with pytest.raises((gradserve.AbortedError, gradserve.NotFoundError)):
            waiting.result(PATIENCE_SECONDS)
    with pytest.raises(gradserve.NotFoundError):
        parameters.read()
    assert not parameters.delete()


async def test_asyncio(server_address: str, name: str, tmp_path: Path) -> None:
    async with gradserve.aio.connect(server_address) as client:
        parameters = await client.parameters(VALUES, shared_name=name)
        version = (await parameters.push_pull({"w": W}, await parameters.read())).version
        assert version["w"].tolist() == (2 * W).tolist()
        assert await parameters.save(tmp_path / "run") == 1
        assert (await parameters.load(tmp_path / "run")).step == 2
        fork = await parameters.fork(shared_name=f"{name}-fork")
        assert (await fork.read()).digest == version.digest
        assert await fork.delete()


@pytest.fixture
def restarting(tmp_path: Path) -> Iterator[RestartingServer]:
    with RestartingServer(tmp_path / "state") as running:
        yield running


@pytest.mark.parametrize("durability", ["round", "gradient"])
@pytest.mark.parametrize("way", WAYS)
def test_restarts(restarting: RestartingServer, way: TransportName, durability: str) -> None:
    """Updates of the open round are there again: the server has kept them, or the client sends them again."""
    optimizer = optim.SGD(0.5, momentum=0.9)
    with gradserve.connect(restarting.address, transport=way) as client:
        parameters, other = (
            client.parameters({"w": W}, shared_name=name, num_required=2, optimizer=optimizer, durability=durability)
            for name in ("restarted", "not")
        )
        for each in (parameters, other):
            version = each.read()
            for _ in range(2):
                each.push({"w": W}, version, worker_id="a")
                if each is parameters:
                    restarting.restart()
                version = each.push_pull({"w": 2 * W}, version, worker_id="b").version
        assert parameters.read().digest == other.read().digest
        assert parameters.info().weights.applied == 4.0


def test_what_is_not_durable_is_lost_and_never_reset(tmp_path: Path) -> None:
    with RestartingServer(None) as server, gradserve.connect(server.address) as client:
        parameters = client.parameters({"w": W}, shared_name="llm")
        parameters.push_pull({"w": W}, 0)
        server.restart()
        with pytest.raises(gradserve.LostError, match="has lost parameters 'default/llm' at step 1"):
            parameters.push({"w": W}, 1)
        with pytest.raises(gradserve.LostError):
            parameters.read()
        assert client.parameters({"w": W}, shared_name="llm").read().step == 0


def test_what_a_server_has_lost_goes_on_from_a_version_of_a_worker() -> None:
    """The first worker that comes brings its own, for all."""
    with RestartingServer(None) as server, gradserve.connect(server.address) as client:
        parameters = client.parameters(VALUES, shared_name="llm")
        parameters.push({"w": W}, 0)
        newest, older = parameters.read(1), parameters.read(0)
        server.restart()
        with pytest.raises(gradserve.LostError):
            parameters.read()
        parameters = client.parameters(newest, shared_name="llm")
        late = client.parameters(older, shared_name="llm")
        found = late.read()
        assert (found.step, found.digest, as_lists(found)) == (1, newest.digest, as_lists(newest))
        assert parameters.push_pull({"w": W}, found).version.values["w"].tolist() == (3 * W).tolist()
