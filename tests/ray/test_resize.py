"""`gradserve cluster resize`, on a real Ray. tests/resizing has what moves, and faults of it."""

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

import gradserve
from gradserve_protocol.placement import home_of
from gradserve_server.commands.cli import cli
from gradserve_server.config import ServerConfig, StateConfig
from gradserve_testing import LocalServer
from tests.cluster.servers import name_at
from tests.kubernetes.test_cluster import Training
from tests.ray.conftest import RayCluster
from tests.servers.polling import PATIENCE_SECONDS, growing_limits
from tests.servers.runtime import NOT_WARMED_UP

GRADIENT = {"w": np.arange(3, dtype=np.float32), "v": np.full((2, 2), 5, np.float32)}
NAMES = [f"sized{number}" for number in range(6)]
SHARDED = NAMES[:2]
MOVING = next(name for name in map("held{}".format, range(99)) if home_of("", name, 3) == 2)
HELD = {MOVING: False, "divided": True}
"""Parameters, and whether they are sharded."""
NAME, ADDRESS = "sized", "gradserve+ray://sized"


def connected() -> gradserve.Client:
    return gradserve.connect(ADDRESS, timeout=PATIENCE_SECONDS)


def opened(client: gradserve.Client, name: str) -> gradserve.GradientAccumulator:
    """Opens an accumulator; some are sharded, with one component on one server and one on another."""
    return client.gradient_accumulator(GRADIENT, name, keep_averages=2, sharded=name in SHARDED)


def held(client: gradserve.Client, name: str) -> gradserve.Parameters:
    return client.parameters(GRADIENT, name, optimizer=gradserve.optim.Adam(0.1), sharded=HELD[name])


def scaled(factor: float) -> dict[str, Any]:
    return {name: (factor * value).astype(np.float32) for name, value in GRADIENT.items()}


def resize(servers: int, *arguments: str) -> Result:
    timeout = () if "--timeout" in arguments else ("--timeout", str(PATIENCE_SECONDS))
    return CliRunner().invoke(cli, ["cluster", "resize", NAME, "--servers", str(servers), *timeout, *arguments])


def leave_server(index: int) -> None:
    """Leaves the actor of a server that the cluster does not have, as a `resize` that is killed does."""
    import ray

    from gradserve.discovery.ray import NAMESPACE, connected_to_ray
    from gradserve_ray.member import Member, directory_of, member_name

    with connected_to_ray():
        where: Any = {"name": member_name(NAME, index), "namespace": NAMESPACE, "lifetime": "detached", "num_cpus": 0}
        member = ray.remote(Member).options(**where).remote(directory_of(NAME), index, None, (), None)
        ray.get(member.on_state.remote("contents"))


def check_none_is_left() -> None:
    from gradserve.discovery.ray import connected_to_ray
    from gradserve_ray.member import member_indexes

    with connected_to_ray():
        assert member_indexes(NAME) == []


@pytest.fixture
def sized(cluster: RayCluster, tmp_path: Path) -> Iterator[RayCluster]:
    """A second cluster of two durable servers, with accumulators of some rounds."""
    up = ("up", "--servers", "2", "--name", NAME, "--cpus-per-server", "0.1", "--state-dir", str(tmp_path))
    cluster.run(*up, "--timeout", str(4 * PATIENCE_SECONDS), "--", "--warm-up", "false")
    try:
        with connected() as client:
            for name in NAMES:
                acc = opened(client, name)
                for step in range(2):
                    acc.push_pull(scaled(step + 1), 1, step)
            for name in HELD:
                held(client, name).push_pull(GRADIENT, 0)
        yield cluster
    finally:
        cluster.run("down", NAME)
        check_none_is_left()


def check(client: gradserve.Client, step: int, servers: int) -> None:
    """Checks the last two averages of each accumulator, and ends one more round."""
    for name in NAMES:
        acc = opened(client, name)
        assert acc.info().num_shards == (servers if name in SHARDED else 0)
        for earlier in (step - 1, step):
            average = acc.read_average(earlier)
            for component, value in scaled(earlier).items():
                np.testing.assert_array_equal(average[component], value)
        acc.push_pull(scaled(step + 1), 1, step)


def test_a_cluster_grows_and_shrinks(sized: RayCluster) -> None:
    """Clients of before learn that it has another size; those of after go on where the run was."""
    before = [each["address"] for each in sized.status(NAME)]
    with connected() as old:
        stays = next(name for name in NAMES[2:] if home_of("", name, 3) == home_of("", name, 2) == 0)
        acc = opened(old, stays)
        versions = {name: held(old, name).read() for name in HELD}
        leave_server(2)
        done = resize(3)
        assert done.exit_code == 0, done.output
        with pytest.raises(
            gradserve.InvalidArgumentError, match="is server 0 of 3 in cluster 'sized', and the call is"
        ):
            acc.push_pull(GRADIENT, 1, 2)
    moved = {name: f"server {home_of('', name, 2)} to 2" for name in NAMES if home_of("", name, 3) == 2}
    moved |= dict.fromkeys((*SHARDED, "divided"), "sharded over 3 servers")
    moved[MOVING] = f"server {home_of('', MOVING, 2)} to 2"
    lines = done.stdout.splitlines()
    assert sorted(lines[: len(moved)]) == sorted(f"default/{name}: {where}" for name, where in moved.items())
    counts = f"{len(moved) - 2} accumulators and 2 parameters moved"
    assert lines[-1] == f"sized: 2 to 3 servers; {counts}, with the same digests"
    found = sized.status(NAME)
    assert [each["address"] for each in found][:2] == before, "servers that stay keep their addresses"
    assert all(each["serves"] for each in found)
    with connected() as client:
        check(client, 2, 3)
        assert {name: held(client, name).read().digest for name in HELD} == {
            name: version.digest for name, version in versions.items()
        }
    done = resize(2)
    assert done.exit_code == 0, done.output
    assert len(sized.status(NAME)) == 2
    with connected() as client:
        check(client, 3, 2)
        for name in HELD:
            assert held(client, name).push_pull(GRADIENT, 1).version.step == 2


class Worker:
    """A worker that trains on all accumulators, and connects again when their servers have gone."""

    def __init__(self, number: int, training: Training) -> None:
        self._number = number
        self._training = training
        self._current: dict[str, Any] = {}
        self.got: list[bytes] = []
        """The averages of each step, one after the other."""
        self.connections = 0

    def work(self) -> list[bytes]:
        while self._training.goes_on(len(self.got)):
            self.connections += 1
            # These errors say that the cluster has another size, or is about to.
            with suppress(gradserve.InvalidArgumentError, gradserve.UnavailableError), connected() as client:
                nets = {
                    name: client.gradient_accumulator(GRADIENT, f"run-{name}", sharded=name in SHARDED)
                    for name in NAMES
                }
                while self._training.goes_on(len(self.got)):
                    self._step(nets)
        return self.got

    def _step(self, nets: dict[str, gradserve.GradientAccumulator]) -> None:
        step = len(self.got)
        gradient = scaled(step + 2 * self._number)
        for name, net in nets.items():
            if name not in self._current:
                self._current[name] = net.push_pull(gradient, 2, step, worker_id=str(self._number))
        self.got.append(b"".join(_bytes(self._current[name]) for name in NAMES))
        self._current = {}


def _bytes(values: Mapping[str, Any]) -> bytes:
    return b"".join(values[component].tobytes() for component in GRADIENT)


def test_workers_go_on_after_a_change_in_the_middle_of_their_run(
    sized: RayCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each gradient is in one average: both workers get the same ones, which are what they have to be at every step."""
    monkeypatch.setenv("GRADSERVE_RESTART_PATIENCE", "3")  # So long a client waits for a server that has gone for good.
    training = Training()
    workers = [Worker(number, training) for number in range(2)]
    with ThreadPoolExecutor(2) as threads:
        ends = [threads.submit(each.work) for each in workers]
        try:
            for servers in (3, 2):
                training.wait_for_steps(10, ends)
                done = resize(servers)
                assert done.exit_code == 0, done.output
            training.wait_for_steps(10, ends)
        finally:
            training.end()
        first, second = (each.result() for each in ends)
    assert all(each.connections >= 3 for each in workers)
    expected = [_bytes(scaled(step + 1)) * len(NAMES) for step in range(len(first))]
    assert first == second == expected


def test_what_cannot_be_leaves_the_cluster_as_it_was(sized: RayCluster, tmp_path: Path) -> None:
    before = sized.status(NAME)
    with connected() as client:
        volatile = client.gradient_accumulator(GRADIENT, name_at(1, 2, "volatile"), durability="none")
        refusals: list[tuple[Result, str]] = [
            (resize(2), "cluster 'sized' has 2 servers already"),
            (resize(3), f"of durability none, which would be lost: {volatile.info().container}/volatile"),
        ]
        volatile.delete()
        acc = opened(client, NAMES[0])
        acc.apply_grad(GRADIENT, 2, worker_id="a")
        for limit in growing_limits(4):
            done = resize(3, "--timeout", f"{limit:g}")
            if "further servers do not answer" not in done.output:
                break
        refusals.append((done, f"rounds that are still open after {limit:g} s: default/{NAMES[0]} (1 grad"))
        assert [each["pid"] for each in sized.status(NAME)] == [each["pid"] for each in before], "none has ended"
        acc.apply_grad(GRADIENT, 2, worker_id="b")
        acc.take_grad(2)
        (tmp_path / "2").mkdir()
        (tmp_path / "2" / "something else").touch()
        refusals.append((resize(3), "expected a state directory of gradserve, but it has 'something else'"))
        (tmp_path / "2" / "something else").unlink()
        config = ServerConfig(runtime=NOT_WARMED_UP, state=StateConfig(state_dir=str(tmp_path / "2")))
        with LocalServer(config) as server, gradserve.connect(server.address) as other:
            other.gradient_accumulator(GRADIENT, "old")
        refusals.append((resize(3), "has accumulator 'default/old' already: empty it; the cluster goes on with 2 serv"))
    for done, message in refusals:
        assert done.exit_code == 1, done.output
        assert message in done.output
    assert [each["address"] for each in sized.status(NAME)] == [each["address"] for each in before]
    with connected() as client:
        assert opened(client, NAMES[0]).info().global_step == 3
        assert {each.name for each in client.list_accumulators()} == set(NAMES)


def test_what_is_volatile_may_end(sized: RayCluster) -> None:
    with connected() as client:
        client.gradient_accumulator(GRADIENT, "volatile", durability="none", idle_lease=60)
    done = resize(1, "--drop-volatile")
    assert done.exit_code == 0, done.output
    assert "default/volatile: lost, its durability is none\n" in done.stdout
    leave_server(7)
    listed: Any = json.loads(CliRunner().invoke(cli, ["ls", "--address", ADDRESS, "--json"]).stdout)
    assert {each["name"] for each in listed["accumulators"]} == set(NAMES)
