"""Backups of servers: under load, of servers that are killed, restored beside clients that know more, on a schedule."""

import hashlib
import shutil
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from operator import lt
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import gradserve
from gradserve_server.config import ListenConfig, ServerConfig, StateConfig
from gradserve_server.config.servers import ClusterConfig
from gradserve_server.storage.backup import back_up
from gradserve_server.storage.directory import StateFiles
from gradserve_testing import LocalServer, ServerProcess
from tests.cluster.servers import name_at
from tests.servers.command_line import run_cli
from tests.servers.polling import PATIENCE_SECONDS, eventually
from tests.servers.restarting import RestartingServer
from tests.servers.runtime import NOT_WARMED_UP

LEVELS = ("none", "round", "gradient")
SIZE = 30_000
NUM_BACKUPS = 4


def digest(*arrays: NDArray[np.generic]) -> str:
    return hashlib.sha256(b"".join([np.ascontiguousarray(each).tobytes() for each in arrays])).hexdigest()


def config(directory: Path, **backups: object) -> ServerConfig:
    return ServerConfig(
        runtime=NOT_WARMED_UP, state=StateConfig.model_validate({"state_dir": str(directory), **backups})
    )


@contextmanager
def serving(directory: Path, **backups: object) -> Iterator[gradserve.Client]:
    """Runs a server on a state directory; yields a client of it."""
    with LocalServer(config(directory, **backups)) as server, gradserve.connect(server.address) as client:
        yield client


def made_in(client: gradserve.Client, level: str = "round") -> gradserve.ConditionalAccumulator:
    return client.conditional_accumulator("float32", (), shared_name=level, durability=level)


def end_round(accumulator: gradserve.ConditionalAccumulator, value: float, step: int = 0) -> None:
    accumulator.apply_grad(value, step)
    assert accumulator.take_grad(1) == value


def restored(backup: Path, directory: Path) -> Path:
    result = run_cli("state", "restore", str(backup), str(directory))
    assert (result.returncode, result.stderr) == (0, "")
    return directory


class Model:
    """The resources that a worker trains: for each step a push_pull for each level, an update, and one of a layer."""

    def __init__(self, client: gradserve.Client) -> None:
        self.sums = {
            level: client.gradient_accumulator(
                {"x": np.zeros(SIZE, np.float32)}, shared_name=level, durability=level, keep_averages=2
            )
            for level in LEVELS
        }
        self.parameters = client.parameters(
            {"w": np.zeros(SIZE, np.float32)},
            shared_name="model",
            optimizer=gradserve.optim.Adam(0.1),
            durability="gradient",
            keep_versions=2,
        )
        self.layer = client.batch_norm(scope="bn")

    def variables(self) -> str:
        found = self.layer.get_variables()
        return digest(*[found[name] for name in sorted(found)])


@dataclass
class Seen:
    """The values of each step that a running server has shown.

    Attributes:
        averages: Digests of averages, by level and step.
        versions: Digests of versions, by step.
        variables: Digests of the layer's variables, by the number of updates.
        hashes: The hashes of the records of rounds, each of which covers all before it.
    """

    averages: dict[tuple[str, int], str] = field(default_factory=dict)
    versions: dict[int, str] = field(default_factory=dict)
    variables: dict[str, int] = field(default_factory=dict)
    hashes: list[str] = field(default_factory=list)


def train(address: str, seen: Seen, is_over: threading.Event) -> None:
    """Trains alone, in an order that every moment of the server has, too."""
    with gradserve.connect(address, timeout=PATIENCE_SECONDS) as client:
        model = Model(client)
        chance = np.random.default_rng(3)
        step = 0
        while not is_over.is_set():
            for level, each in model.sums.items():
                gradient = chance.standard_normal(SIZE, np.float32)
                average = each.push_pull({"x": gradient}, 1, step)
                seen.averages[level, step + 1] = digest(average["x"])
            model.parameters.push({"w": chance.standard_normal(SIZE, np.float32)}, step)
            version = model.parameters.read(step + 1)
            seen.versions[version.step] = digest(version["w"])
            model.layer.forward(chance.standard_normal((8, 5), np.float32))
            model.layer.run_updates()
            seen.variables[model.variables()] = step + 1
            step += 1
        seen.hashes += [each.hash for each in model.parameters.rounds()]


def load(address: str, level: str, is_over: threading.Event) -> None:
    """Applies and takes gradients that others compete for, as fast as possible."""
    with gradserve.connect(address, timeout=PATIENCE_SECONDS) as client:
        model = client.gradient_accumulator({"x": np.zeros(SIZE)}, shared_name=f"load {level}", durability=level)
        while not is_over.is_set():
            with suppress(gradserve.StaleGradientError):
                model.apply_grad({"x": np.ones(SIZE)}, model.info().global_step)
            with suppress(gradserve.DeadlineExceededError):
                model.take_grad(1, timeout=0.05)
        with suppress(gradserve.NotDurableError):  # of a gradient whose round nobody ends
            client.close(timeout=0)


@pytest.mark.exhaustive
def test_each_backup_under_load_is_the_state_of_one_moment(tmp_path: Path) -> None:
    seen, is_over = Seen(), threading.Event()
    with LocalServer(config(tmp_path / "state")) as server:
        threads = [threading.Thread(target=train, args=(server.address, seen, is_over))]
        threads += [
            threading.Thread(target=load, args=(server.address, level, is_over)) for level in LEVELS for _ in range(2)
        ]
        for each in threads:
            each.start()
        try:
            for number in range(NUM_BACKUPS):
                eventually(partial(len, seen.versions), partial(lt, len(seen.versions) + 1))
                back_up(tmp_path / "state", tmp_path / f"backup{number}")
        finally:
            is_over.set()
            for each in threads:
                each.join()
    steps = [check(tmp_path / f"backup{number}", tmp_path / f"restored{number}", seen) for number in range(NUM_BACKUPS)]
    assert steps == sorted(set(steps)), "the server went on between two backups"


def check(backup: Path, directory: Path, seen: Seen) -> int:
    """Checks all that is in a backup against what the server has shown; returns the step of the parameters."""
    result = run_cli("state", "check", str(backup))
    assert (result.returncode, "nothing is damaged" in result.stdout) == (0, True)
    with serving(restored(backup, directory)) as client:
        model = Model(client)
        assert model.sums["none"].info().global_step == 0
        durable = [model.sums[level] for level in LEVELS[1:]]
        for level, each in zip(LEVELS[1:], durable, strict=True):
            kept = each.info().kept_steps
            assert len(kept) == 2
            assert [digest(each.read_average(step)["x"]) for step in kept] == [
                seen.averages[level, step] for step in kept
            ]
        info = model.parameters.info()
        for step in (info.step - 1, info.step):
            assert digest(model.parameters.read(step)["w"]) == seen.versions[step]
        hashes = [each.hash for each in model.parameters.rounds()]
        assert hashes == seen.hashes[: info.step]
        assert model.parameters.rounds()[-1].digest_after == info.digest
        updates = seen.variables[model.variables()]
        order = [*[each.info().global_step for each in durable], info.step, updates]
        assert order == sorted(order, reverse=True), "no later change without an earlier one"
        assert order[0] - order[-1] <= 1
        # It goes on from there.
        model.parameters.push({"w": np.ones(SIZE, np.float32)}, info.step)
        assert durable[0].push_pull({"x": np.ones(SIZE, np.float32)}, 1, order[0])["x"].tolist() == [1] * SIZE
        return info.step


@pytest.mark.exhaustive
def test_a_server_that_is_killed_and_started_again_during_a_backup(tmp_path: Path) -> None:
    with (
        ServerProcess(tmp_path, "--state-dir", str(tmp_path / "state")) as server,
        gradserve.connect(server.address, timeout=PATIENCE_SECONDS) as client,
    ):
        model = client.parameters(
            {"w": np.zeros(1 << 20, np.float32)}, shared_name="model", optimizer=gradserve.optim.Adam(0.1)
        )
        for step in range(3):
            model.push({"w": np.full(1 << 20, step + 1, np.float32)}, step)
        expected = model.read(3).digest
        calls: list[int] = []

        def go_on(num_bytes: int) -> None:
            calls.append(num_bytes)
            if len(calls) == 1:
                server.kill()
                server.restart()
            elif len(calls) < 8:
                model.push({"w": np.ones(1 << 20, np.float32)}, 1 + len(calls))

        back_up(tmp_path / "state", tmp_path / "backup", go_on)
        assert model.info().step == 9
    with serving(restored(tmp_path / "backup", tmp_path / "restored")) as client:
        model = client.parameters(
            {"w": np.zeros(1 << 20, np.float32)}, shared_name="model", optimizer=gradserve.optim.Adam(0.1)
        )
        assert (model.info().step, model.read(3).digest) == (3, expected)


class TestCommand:
    """`gradserve state backup` and `restore`, as a user calls them."""

    @pytest.fixture
    def state(self, tmp_path: Path) -> Path:
        """The state directory of a server that has stopped."""
        with serving(tmp_path / "state") as client:
            end_round(made_in(client), 3)
        return tmp_path / "state"

    def test_a_server_that_has_stopped(self, state: Path, tmp_path: Path) -> None:
        result = run_cli("state", "backup", str(tmp_path / "backup"), "--state-dir", str(state))
        assert (result.returncode, result.stderr) == (0, "")
        assert result.stdout.startswith(f"{tmp_path}/backup: commit ")
        with serving(restored(tmp_path / "backup", tmp_path / "restored")) as client:
            assert made_in(client).read_average() == 3

    def test_errors_are_one_line(self, state: Path, tmp_path: Path) -> None:
        result = run_cli("state", "backup", str(state.parent), "--state-dir", str(state))
        assert (result.returncode, result.stdout) == (1, "")
        assert result.stderr == f"Error: {tmp_path}: expected a new or an empty folder, but it has 'state'\n"
        result = run_cli("state", "backup", str(tmp_path / "backup"))
        assert (result.returncode, "Missing option '--state-dir'" in result.stderr) == (2, True)

    def test_a_server_is_not_started_on_a_backup(self, state: Path, tmp_path: Path) -> None:
        back_up(state, tmp_path / "backup")
        result = run_cli("serve", "--listen", "127.0.0.1:0", "--state-dir", str(tmp_path / "backup"))
        assert result.returncode == 1
        assert f"`gradserve state restore {tmp_path}/backup DIRECTORY` makes a state directory of it" in result.stderr
        for command in ("check", "export"):
            arguments = ["round", str(tmp_path / "average.npz")] if command == "export" else []
            assert run_cli("state", command, str(tmp_path / "backup"), *arguments).returncode == 0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RestartingServer]:
    with RestartingServer(tmp_path / "state") as started:
        yield started


def test_clients_do_not_take_what_was_restored_for_what_they_had(server: RestartingServer, tmp_path: Path) -> None:
    with gradserve.connect(server.address, timeout=PATIENCE_SECONDS) as client:
        sums = {level: made_in(client, level) for level in LEVELS[1:]}
        model = client.parameters({"w": np.zeros(3)}, shared_name="model", optimizer=gradserve.optim.Adam(0.1))
        layer = client.batch_norm(scope="bn")
        for step in range(2):
            for each in sums.values():
                end_round(each, step, step)
            model.push({"w": np.ones(3)}, step)
            layer.forward(np.full((4, 3), step, np.float32))
            if step == 0:
                back_up(tmp_path / "state", tmp_path / "backup")
        for each in sums.values():
            each.apply_grad(9.0, 2)  # in no backup
        server.stop()
        shutil.rmtree(tmp_path / "state")
        restored(tmp_path / "backup", tmp_path / "state")
        server.start()
        calls: list[Callable[[], object]] = [
            *[each.num_accumulated for each in sums.values()],
            *[partial(each.apply_grad, 1.0, 2) for each in sums.values()],
            lambda: model.push({"w": np.ones(3)}, 2),
            lambda: model.read(2),
        ]
        for call in calls:
            for _ in range(2):
                with pytest.raises(gradserve.LostError, match=r"started again"):
                    call()
        with pytest.raises(gradserve.NotFoundError, match="the state was restored from a backup; another one has this"):
            layer.forward(np.ones((4, 3), np.float32))
        opened = made_in(client)
        assert (opened.info().global_step, opened.num_accumulated()) == (1, 0)
        assert opened.read_average() == 0
        again = client.parameters({"w": np.zeros(3)}, shared_name="model", optimizer=gradserve.optim.Adam(0.1))
        assert again.info().step == 1
        client.close(timeout=0)


HOME, OTHER = 0, 1


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("put_back", [(HOME,), (OTHER,), (HOME, OTHER)])
def test_versions_of_sharded_parameters_are_never_made_of_different_rounds(
    tmp_path: Path, put_back: tuple[int, ...]
) -> None:
    """Backups of two servers are of different moments."""
    zeros = {"v": np.zeros(1 << 15, np.float32), "w": np.zeros(1 << 15, np.float32)}
    with ExitStack() as stack:
        places = [ClusterConfig(cluster="train", cluster_size=2, cluster_index=index) for index in range(2)]
        servers = [stack.enter_context(RestartingServer(tmp_path / str(each.cluster_index), each)) for each in places]
        client = stack.enter_context(gradserve.connect([each.address for each in servers], timeout=PATIENCE_SECONDS))

        def opened() -> gradserve.Parameters:
            return client.parameters(
                zeros, shared_name=name_at(HOME, 2), sharded=True, optimizer=gradserve.optim.SGD(1.0), keep_versions=9
            )

        def push(model: gradserve.Parameters, value: float) -> None:
            model.push({name: np.full_like(each, value) for name, each in zeros.items()}, model.info().step)
            model.read()

        model = opened()
        push(model, 1)
        back_up(tmp_path / "0", tmp_path / "backup0")
        push(model, 10)
        back_up(tmp_path / "1", tmp_path / "backup1")
        push(model, 100)
        for index in put_back:
            servers[index].stop()
            shutil.rmtree(tmp_path / str(index))
            restored(tmp_path / f"backup{index}", tmp_path / str(index))
            servers[index].start()
        for attempt in (model, opened()):
            for _ in range(2):
                with suppress(gradserve.AbortedError, gradserve.LostError):
                    push(attempt, 1000)
                with suppress(gradserve.AbortedError, gradserve.LostError):
                    found = {float(value) for each in attempt.read().values() for value in np.unique(each)}
                    assert len(found) == 1


class TestSchedule:
    """`gradserve serve --backup-dir`."""

    def backups(self, folder: Path) -> list[str]:
        found = sorted(each.name for each in folder.iterdir()) if folder.exists() else []
        return [name for name in found if not name.startswith(".")]

    def later(self, folder: Path, earlier: list[str]) -> list[str]:
        """Waits until all that is kept is later."""
        return eventually(
            lambda: self.backups(folder)[1:], lambda found: len(found) == 2 and set(earlier).isdisjoint(found)
        )

    def test_the_newest_are_kept(self, tmp_path: Path) -> None:
        folder = tmp_path / "backups"
        folder.mkdir()
        (folder / ".20200101T000000.000000Z.unfinished" / "segments").mkdir(parents=True)
        (folder / "20200101T000000.000000Z").mkdir()  # not of this server
        settings = {"backup_dir": str(folder), "backup_interval_seconds": 0.05, "backup_keep": 2}
        with serving(tmp_path / "state", **settings) as client:
            end_round(made_in(client), 3)
            first = eventually(lambda: self.backups(folder)[1:])
            second = self.later(folder, first)  # of which one may have begun before the round ended
            self.later(folder, second)
        kept = self.backups(folder)
        assert (len(kept), kept[0]) == (3, "20200101T000000.000000Z")
        assert sorted(each.name for each in folder.iterdir()) == kept, "nothing else is left, also of the last one"
        for number, name in enumerate(kept[1:]):
            assert StateFiles(folder / name).is_backup
            with serving(restored(folder / name, tmp_path / f"restored{number}")) as client:
                assert made_in(client).read_average() == 3

    def test_a_restart_does_not_begin_the_interval_anew(self, tmp_path: Path) -> None:
        settings = config(tmp_path / "state", backup_dir=str(tmp_path / "backups"))
        taken = []
        for _ in range(3):
            with LocalServer(settings) as server:
                figures = partial(server.inspect, lambda running: running.status.facts.backups())
                found = eventually(figures, lambda found: found is not None and found.newest is not None)
                assert found is not None
                taken.append(found.num_taken)
        assert taken == [1, 0, 0]
        assert len(self.backups(tmp_path / "backups")) == 1

    def test_a_failure_is_counted_and_the_server_goes_on(self, tmp_path: Path) -> None:
        (tmp_path / "backups").write_text("")
        state = StateConfig(state_dir=str(tmp_path / "state"), backup_dir=str(tmp_path / "backups"))
        settings = ServerConfig(runtime=NOT_WARMED_UP, state=state, listen=ListenConfig(http_listen="127.0.0.1:0"))
        with LocalServer(settings) as server, gradserve.connect(server.address) as client:
            url = server.inspect(lambda running: running.observation.url)

            def metrics() -> str:
                with urllib.request.urlopen(f"{url}metrics") as reply:
                    return str(reply.read().decode())

            eventually(metrics, lambda text: 'gradserve_backups_total{outcome="failed"} 1.0\n' in text)
            assert "gradserve_newest_backup_timestamp_seconds 0.0\n" in metrics()
            assert "gradserve_backup_interval_seconds 3600.0\n" in metrics()
            end_round(made_in(client), 3)
