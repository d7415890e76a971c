"""Sharded parameters: every call has the results that it has on one server, bit by bit."""

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradserve
import gradserve.aio
from gradserve import optim, reductions
from tests.cluster.servers import addresses_of, name_at, running_cluster
from tests.cluster.sharding.clients import small_pieces
from tests.resizing.folders import cluster

WAYS = ("grpc", "bulk", "shared_memory")
RANDOM = np.random.default_rng(7)
VALUES: Mapping[str, Any] = {
    "kernel": RANDOM.standard_normal((7, 3)).astype(np.float32),
    "bias": RANDOM.standard_normal(3),
    "scale": RANDOM.standard_normal((5, 2)).astype(np.float16),
}
OPTIMIZERS = (optim.SGD(0.5), optim.SGD(0.1, momentum=0.9, nesterov=True), optim.AdamW(0.05), optim.Yogi(0.01))


def updates(rounds: int, workers: int) -> Iterator[list[dict[str, Any]]]:
    """Yields the updates of the workers of each round."""
    random = np.random.default_rng(11)
    for _ in range(rounds):
        yield [
            {name: random.standard_normal(value.shape).astype(value.dtype) for name, value in VALUES.items()}
            for _ in range(workers)
        ]


@contextmanager
def on(size: int, way: Any = "grpc") -> Iterator[gradserve.Client]:
    """Connects to a new cluster, whose parameters have pieces of any size."""
    with (
        small_pieces(),
        running_cluster(size) as servers,
        gradserve.connect(addresses_of(servers), transport=way) as client,
    ):
        yield client


def trained(client: gradserve.Client, *, sharded: bool, **properties: Any) -> tuple[list[Any], Any]:
    """Returns the versions of ten rounds of two workers, and the parameters after them."""
    properties = {"optimizer": OPTIMIZERS[1], "num_required": 2, "update": "gradient", **properties}
    name = name_at(0, 2)
    parameters = client.parameters(VALUES, name, sharded=sharded, **properties)
    versions = [parameters.read()]
    for step, (first, second) in enumerate(updates(10, 2)):
        pushed = parameters.push(first, step, worker_id="a", weight=2.0)
        assert pushed.outcome is gradserve.Outcome.ACCEPTED
        pulled = parameters.push_pull(second, step, worker_id="b", weight=0.5)
        assert pulled.version.step == step + 1
        versions.append(pulled.version)
    return versions, parameters


def same(found: Any, expected: Any) -> None:
    """Asserts that two versions have the same bits."""
    assert (found.step, found.digest) == (expected.step, expected.digest)
    for name, value in expected.components.items():
        np.testing.assert_array_equal(found.components[name], value)
        assert found.components[name].dtype == value.dtype


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("way", WAYS)
def test_versions_have_the_bits_of_one_server(way: Any) -> None:
    with on(1) as client:
        expected, _ = trained(client, sharded=False)
    for size in (2, 3):
        with on(size, way) as client:
            found, parameters = trained(client, sharded=True)
            for each, other in zip(found, expected, strict=True):
                same(each, other)
            assert parameters.info().num_shards == size
            same(parameters.read(), expected[-1])


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
@pytest.mark.parametrize("deterministic", [False, True])
def test_optimizers_take_the_same_steps_on_every_number_of_servers(optimizer: Any, deterministic: bool) -> None:
    properties = {"optimizer": optimizer, "deterministic": deterministic, "schedule": optim.linear(8, warmup=2)}
    digests = []
    for size in (1, 2, 3):
        with on(size) as client:
            versions, _ = trained(client, sharded=size > 1, **properties)
            digests.append([each.digest for each in versions])
    assert digests[0] == digests[1] == digests[2]


WHOLE_UPDATES: tuple[dict[str, Any], ...] = (
    {"clip_norm": 4.0},
    {"reduction": reductions.trimmed_mean(0.3), "deterministic": True},
    {"reduction": reductions.krum(0), "clip_norm": 4.0},
    {"reduction": reductions.multi_krum(0, 2, report_only=True), "normalize": "count"},
    {"reduction": reductions.geometric_median(), "num_required": 2},
)
"""Properties by which an update counts as a whole."""


def test_norms_and_distances_are_those_of_whole_updates() -> None:
    """Versions and records are those of one server, which also knows cosines."""
    found = []
    for size in (1, 2, 3):
        with on(size) as client:
            seen: list[Any] = []
            for properties in WHOLE_UPDATES:
                properties = {"update": "gradient", "num_required": 3, "keep_versions": 9, **properties}
                parameters = client.parameters(VALUES, optimizer=OPTIMIZERS[1], sharded=size > 1, **properties)
                for number, (update,) in enumerate(updates(6, 1)):
                    step = number // properties["num_required"]
                    parameters.push(update, step, worker_id=f"worker {number}", weight=1.0 + number)
                seen.append([parameters.read(step).digest for step in range(parameters.read().step + 1)])
                seen.append([(each.norm, each.dropped) for one in parameters.rounds() for each in one.updates])
            found.append(seen)
    assert found[0] == found[1] == found[2]
    norms = [norm for norm, _ in found[0][1]]
    assert min(norms) > 1.0
    assert any(dropped for _, dropped in found[0][5]), "krum drops some"


PARTIAL = (("bias",), ("kernel", "bias"), ("scale",), ("kernel",), ("bias", "scale"), ("scale",))
"""The components of six updates. One of them is on one of two servers, and another on both."""


def partial_updates() -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Yields the step, worker and update of each push of three rounds."""
    for number, (names, (update,)) in enumerate(zip(PARTIAL, updates(len(PARTIAL), 1), strict=True)):
        yield number // 2, "ab"[number % 2], {name: update[name] for name in names}


def test_updates_without_a_component_on_some_servers() -> None:
    """What no update of a round has is skipped, on every server."""
    digests = []
    for size in (1, 2, 3):
        with on(size) as client:
            parameters = client.parameters(
                VALUES, "net", optimizer=optim.Adam(0.1), num_required=2, update="gradient", sharded=size > 1
            )
            for step, worker, update in partial_updates():
                parameters.push(update, step, worker_id=worker)
            saved = parameters.read()
            digests.append(saved.digest)
    assert digests[0] == digests[1] == digests[2]


def test_they_survive_restarts(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    digests = []
    for folder, size in ((tmp_path / "one", 1), (tmp_path, 2)):
        for step, worker, update in partial_updates():
            with small_pieces(), cluster(folder, size) as client:
                parameters = client.parameters(
                    VALUES,
                    "net",
                    optimizer=optim.Adam(0.1),
                    num_required=2,
                    update="gradient",
                    sharded=size > 1,
                    durability="gradient",
                )
                parameters.push(update, step, worker_id=worker)
        with small_pieces(), cluster(folder, size) as client:
            digests.append(client.parameters(shared_name="net").read().digest)
    assert digests[0] == digests[1]


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("is_changed", [False, True])
def test_a_saved_state_is_that_of_one_server(tmp_path: Path, is_changed: bool) -> None:
    """While other servers are behind their home, and after it has got another optimizer, too."""
    first, *later = [update for (update,) in updates(5, 1)]
    digests = []
    for size in (1, 2):
        path = tmp_path / f"{size}.safetensors"
        with on(size) as client:
            properties: dict[str, Any] = {"update": "gradient", "sharded": size > 1}
            trained = client.parameters(VALUES, "net", optimizer=optim.SGD(0.1, momentum=0.9), **properties)
            for step, update in enumerate(later[:3]):
                trained.push(update, step)
            if is_changed:
                trained.change(optimizer=optim.Yogi(0.1))
            trained.save(path)
            saved = gradserve.load_parameters(path)
            loaded = client.parameters(saved, "loaded", **properties)
            for each in (trained, loaded):
                each.push(first, 3)
                digests.append(each.read().digest)
    assert len(set(digests)) == 1


def test_workers_push_at_the_same_time() -> None:
    with on(2) as client, ThreadPoolExecutor(4) as threads:
        parameters = client.parameters(VALUES, "net", num_required=4, sharded=True)
        for step in range(5):
            pulled = list(
                threads.map(
                    lambda worker, step=step: parameters.push_pull(
                        {name: np.full_like(value, worker) for name, value in VALUES.items()},
                        step,
                        worker_id=str(worker),
                    ),
                    range(4),
                )
            )
            assert {each.version.step for each in pulled} == {step + 1}
            assert len({each.version.digest for each in pulled}) == 1
        np.testing.assert_allclose(parameters.read()["bias"], VALUES["bias"] + 5 * 1.5)


def test_a_server_that_was_read_last_long_ago_catches_up() -> None:
    with on(3) as client:
        parameters = client.parameters(VALUES, "net", sharded=True)
        for step in range(7):
            parameters.push({name: np.ones_like(value) for name, value in VALUES.items()}, step)
        assert parameters.info().step == 7
        np.testing.assert_allclose(parameters.read()["bias"], VALUES["bias"] + 7)
        assert [each.step for each in parameters.rounds()] == list(range(1, 8))


def test_a_stale_update_does_not_count_and_is_forgotten() -> None:
    with on(2) as client:
        parameters = client.parameters(VALUES, "net", sharded=True)
        one = {name: np.ones_like(value) for name, value in VALUES.items()}
        parameters.push_pull(one, 0)
        before = parameters.info().num_bytes
        late = parameters.push_pull(one, 0)
        assert (late.outcome, late.version.step) == (gradserve.Outcome.STALE, 1)
        parameters.push_pull(one, 1)
        parameters.push_pull(one, 2)
        assert parameters.info().num_bytes <= before + 1024


def test_rules_change_on_all_servers() -> None:
    with on(1) as client:
        expected = changed(client, sharded=False)
    with on(2) as client:
        assert changed(client, sharded=True) == expected


def changed(client: gradserve.Client, *, sharded: bool) -> list[str]:
    """Returns the digests of rounds among which the optimizer and the schedule change."""
    parameters = client.parameters(VALUES, name_at(0, 2), optimizer=optim.Adam(0.1), update="gradient", sharded=sharded)
    digests = []
    for step, (update,) in enumerate(updates(9, 1)):
        if step == 2:
            parameters.change(optimizer=optim.Adam(0.5))
        if step == 4:
            parameters.change(schedule=optim.cosine(4))
        if step == 6:
            parameters.change(optimizer=optim.SGD(0.1, momentum=0.5))
        digests.append(parameters.push_pull(update, step).version.digest)
    return digests


def test_a_saved_run_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    every = list(updates(6, 1))
    digests = {}
    for size, sharded in ((1, False), (2, True), (3, True)):
        with on(size) as client:
            path = tmp_path / f"{size}.safetensors"
            first = client.parameters(VALUES, "a", optimizer=optim.AdamW(0.05), update="gradient", sharded=sharded)
            for step, (update,) in enumerate(every[:3]):
                first.push_pull(update, step)
            assert first.save(path) == 3
            others = {
                "loaded": client.parameters(
                    VALUES, "b", optimizer=optim.AdamW(0.05), update="gradient", sharded=sharded
                ),
                "created": client.parameters(gradserve.load_parameters(path), "c", update="gradient", sharded=sharded),
                "forked": first.fork(shared_name=name_at(0, size, "fork")),
            }
            others["loaded"].push_pull(every[5][0], 0)
            assert others["loaded"].load(path).step == 3
            for each in (first, *others.values()):
                for step, (update,) in enumerate(every[3:], 3):
                    version = each.push_pull(update, step).version
                digests[size, each.name] = version.digest
    assert len(set(digests.values())) == 1, digests


def test_parameters_are_found_listed_and_deleted_as_one() -> None:
    with on(3) as client:
        client.parameters(VALUES, "net", sharded=True)
        found = client.parameters(shared_name="net")
        found.push_pull({name: np.ones_like(value) for name, value in VALUES.items()}, 0)
        (listed,) = client.list_parameters()
        assert (listed.name, listed.step, listed.num_shards) == ("net", 1, 3)
        assert found.delete()
        assert not client.list_parameters()
        again = client.parameters(VALUES, "net", sharded=True)
        assert again.read().step == 0
        assert client.delete_parameters("net")
        assert not client.delete_parameters("net")
        with pytest.raises(gradserve.NotFoundError):
            again.push(VALUES, 0)


async def test_the_asyncio_client_has_the_same_calls(tmp_path: Path) -> None:
    with small_pieces(), running_cluster(2) as servers:
        async with gradserve.aio.connect(addresses_of(servers)) as client:
            parameters = await client.parameters(VALUES, "net", sharded=True)
            ones = {name: np.ones_like(value) for name, value in VALUES.items()}
            pulled = await parameters.push_pull(ones, 0)
            same(await parameters.read(), pulled.version)
            assert await parameters.save(tmp_path / "saved.safetensors") == 1
            assert (await parameters.load(tmp_path / "saved.safetensors")).step == 2
            assert (await parameters.read()).digest == pulled.version.digest
            assert await parameters.delete()


def test_private_parameters_are_sharded_too() -> None:
    with on(2) as client:
        parameters = client.parameters(VALUES, sharded=True)
        assert parameters.push_pull(VALUES, 0).version.step == 1
