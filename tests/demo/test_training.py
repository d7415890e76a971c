"""The demo: its mathematics, its bookkeeping, and small real runs."""

import io
import multiprocessing
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console

import gradserve
from gradserve_demo import coordinator, network
from gradserve_demo.command import demo
from gradserve_demo.coordinator import run_demo
from gradserve_demo.digits import Batches, load_digits
from gradserve_demo.network import FloatArray
from gradserve_demo.options import DemoError, DemoOptions
from gradserve_demo.processes import ServerProcess
from gradserve_demo.report import DemoReport, TrainingResult, WorkerResult, render
from gradserve_demo.worker import Message
from gradserve_protocol.extras import install_command
from tests.servers.polling import PATIENCE_SECONDS

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


class TestNetwork:
    def test_gradients_are_those_of_numeric_differentiation(self) -> None:
        generator = np.random.default_rng(0)
        weights = network.initial_weights(5, 4, 3, seed=1, dtype=np.float64)
        images = generator.uniform(0, 1, (7, 5))
        labels = generator.integers(0, 3, 7)
        _, gradients = network.loss_and_gradients(weights, images, labels)

        delta = 1e-6
        for name, value in weights.items():
            for index in np.ndindex(value.shape):
                losses = []
                for sign in (1, -1):
                    moved = value.copy()
                    moved[index] += sign * delta
                    losses.append(network.mean_loss({**weights, name: moved}, images, labels))
                numeric = (losses[0] - losses[1]) / (2 * delta)
                assert gradients[name][index] == pytest.approx(numeric, abs=1e-8), (name, index)

    @pytest.mark.parametrize("dtype", [np.float32, np.float64])
    def test_everything_has_the_type_of_the_weights(self, dtype: type[np.floating]) -> None:
        weights = network.initial_weights(5, 4, 3, seed=1, dtype=dtype)
        _, gradients = network.loss_and_gradients(weights, np.ones((2, 5), dtype), np.array([0, 1]))
        for name, value in network.descend(weights, gradients, 0.1).items():
            assert weights[name].dtype == gradients[name].dtype == value.dtype == dtype

    def test_the_mean_of_the_shares_is_the_gradient_of_the_joint_batch(self) -> None:
        generator = np.random.default_rng(0)
        weights = network.initial_weights(5, 4, 3, seed=1, dtype=np.float64)
        images, labels = generator.uniform(0, 1, (12, 5)), generator.integers(0, 3, 12)
        loss, joint = network.loss_and_gradients(weights, images, labels)
        shares = [network.loss_and_gradients(weights, images[i::4], labels[i::4]) for i in range(4)]
        assert np.mean([share_loss for share_loss, _ in shares]) == pytest.approx(loss)
        for name, value in joint.items():
            np.testing.assert_allclose(np.mean([share[name] for _, share in shares], axis=0), value)

    def test_accuracy_counts_the_most_probable_class(self) -> None:
        weights = network.initial_weights(2, 2, 2, seed=0)
        zeros = {name: np.zeros_like(value) for name, value in weights.items()}
        zeros["output_bias"] = np.array([0, 1], np.float32)
        images = np.zeros((4, 2), np.float32)
        assert network.accuracy(zeros, images, np.array([1, 1, 1, 0])) == 0.75

    def test_the_largest_difference_is_found_in_any_weight(self) -> None:
        left = {"a": np.zeros(2), "b": np.zeros(2)}
        assert network.max_difference(left, {"a": np.zeros(2), "b": np.array([0.5, -2])}) == 2


class TestBatches:
    @pytest.mark.parametrize("num_workers", [1, 4, 5])
    def test_the_shares_make_up_the_joint_batch(self, num_workers: int) -> None:
        batches = Batches(100, num_workers, 3, seed=7)
        for step in range(2 * batches.steps_per_epoch):
            shares = [batches.share(step, worker) for worker in range(num_workers)]
            assert [len(share) for share in shares] == [3] * num_workers
            np.testing.assert_array_equal(np.concatenate(shares), batches.joint(step))

    def test_an_epoch_has_every_example_once_but_for_a_rest(self) -> None:
        batches = Batches(100, 4, 3, seed=7)
        assert batches.steps_per_epoch == 8
        epochs = [np.concatenate([batches.joint(8 * epoch + step) for step in range(8)]) for epoch in range(2)]
        for examples in epochs:
            assert len(set(examples)) == len(examples) == 96
        assert not np.array_equal(epochs[0], epochs[1])

    def test_the_seed_decides_the_order(self) -> None:
        first, same, other = (Batches(100, 2, 5, seed=seed) for seed in (1, 1, 2))
        np.testing.assert_array_equal(first.joint(3), same.joint(3))
        assert not np.array_equal(first.joint(3), other.joint(3))

    @pytest.mark.parametrize("sizes", [(0, 1), (1, 0), (11, 10)])
    def test_batches_that_cannot_be_filled_are_refused(self, sizes: tuple[int, int]) -> None:
        with pytest.raises(ValueError, match=r"at least 1|only 100"):
            Batches(100, *sizes, seed=0)


class TestDigits:
    def test_the_digits_are_split_without_overlap(self) -> None:
        digits = load_digits(seed=0)
        assert digits.train_images.shape == (1437, 64)
        assert digits.test_images.shape == (360, 64)
        assert digits.train_images.dtype == np.float32
        assert digits.train_images.min() == 0
        assert digits.train_images.max() == 1
        assert set(digits.test_labels) == set(range(10))

        def rows(images: FloatArray) -> set[bytes]:
            return {row.tobytes() for row in images}

        # All 1797 images are different, so none can be in both.
        assert not rows(digits.train_images) & rows(digits.test_images)


class TestOptions:
    @pytest.mark.parametrize("name", ["workers", "epochs", "batch_size", "hidden"])
    def test_numbers_below_one_are_refused(self, name: str) -> None:
        with pytest.raises(ValueError, match=f"{name} must be at least 1"):
            small("127.0.0.1:1", Path(), **{name: 0})


def quiet() -> Console:
    return Console(file=io.StringIO())


def small(address: str, output: Path, **changes: object) -> DemoOptions:
    options = DemoOptions(workers=2, epochs=2, batch_size=40, address=address, output=output)
    return replace(options, **changes)  # type: ignore[arg-type]


def shown(report: DemoReport) -> str:
    console = quiet()
    console.print(render(report))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


class TestRun:
    def test_workers_and_one_process_end_with_equal_weights(
        self, server_address: str, tmp_path: Path, client: gradserve.Client
    ) -> None:
        report = run_demo(small(server_address, tmp_path / "new" / "folder"), console=quiet())

        assert report.problem is None
        assert report.max_weight_difference <= 1e-5
        assert report.num_steps == len(report.distributed.losses) == len(report.single.losses) == 34
        np.testing.assert_allclose(report.distributed.losses, report.single.losses, rtol=1e-4)
        assert [point.step for point in report.distributed.accuracies] == [0, 17, 34]
        assert report.distributed.accuracies == report.single.accuracies
        assert report.distributed.final_accuracy > 0.8
        assert [(worker.contributed, worker.stale) for worker in report.workers] == [(34, 0)] * 2
        assert report.plot.read_bytes().startswith(PNG_SIGNATURE)
        assert "Same result" in shown(report)
        # Nothing of this run is left on the server.
        assert not [info.name for info in client.list_parameters() if info.name.startswith("demo-")]

    def test_a_worker_that_is_killed_and_started_again_changes_nothing(
        self, server_address: str, tmp_path: Path
    ) -> None:
        """It reads the newest weights; whether its last gradient had arrived or not, each counts once."""
        report = run_demo(small(server_address, tmp_path, kill=True), console=quiet())

        assert report.problem is None
        assert [worker.killed_at is not None for worker in report.workers] == [False, True]
        assert report.workers[0].contributed == report.num_steps
        assert report.workers[1].contributed in {report.num_steps - 1, report.num_steps}
        text = shown(report)
        assert "worker-1 was killed at step" in text
        assert "Same result" in text

    def test_a_backup_worker_makes_late_gradients_and_no_harm(self, server_address: str, tmp_path: Path) -> None:
        report = run_demo(small(server_address, tmp_path, backup=1), console=quiet())

        assert report.has_backup
        assert [worker.slow for worker in report.workers] == [False, False, True]
        # Every worker ends at the last step, and each round took two gradients of three: somebody
        # must have been late.
        assert sum(worker.contributed for worker in report.workers) == 2 * report.num_steps
        assert sum(worker.stale for worker in report.workers) > 0
        text = shown(report)
        assert "worker-2 (slow)" in text
        assert "stale" in text

    @pytest.mark.parametrize("kill", [False, True])
    def test_workers_that_train_by_themselves(self, server_address: str, tmp_path: Path, kill: bool) -> None:
        """34 steps are three rounds of ten, and one of four."""
        report = run_demo(small(server_address, tmp_path, diloco=True, kill=kill), console=quiet())

        assert report.sync_every == 10
        assert report.num_steps == len(report.distributed.losses) == 34
        assert report.workers[0].contributed == 4
        if not kill:
            np.testing.assert_allclose(report.distributed.losses[0], report.single.losses[0], rtol=1e-4)
            assert np.all(np.isfinite(report.distributed.losses))
        assert report.distributed.final_accuracy > 0.7
        assert report.max_weight_difference > 0

    def test_a_worker_that_fails_is_reported(self, server_address: str, tmp_path: Path) -> None:
        options = small(server_address, tmp_path, learning_rate="not a number")
        with pytest.raises(DemoError, match=r"worker-\d failed: "):
            run_demo(options, console=quiet())

    def test_a_worker_that_dies_is_reported(
        self, server_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        add = coordinator._Course.add

        def add_and_kill(self: coordinator._Course, index: int, message: Message) -> None:
            add(self, index, message)
            for process in multiprocessing.active_children():
                if process.name == "worker-1":
                    process.kill()

        monkeypatch.setattr(coordinator._Course, "add", add_and_kill)
        with pytest.raises(DemoError, match="worker-1 was not done, but its process ended with exit code -9"):
            run_demo(small(server_address, tmp_path, epochs=200), console=quiet())
        assert not multiprocessing.active_children()

    def test_a_server_that_is_not_there_is_reported(self, tmp_path: Path) -> None:
        options = small("127.0.0.1:1", tmp_path, timeout=1.0)
        with pytest.raises(gradserve.GradserveError):
            run_demo(options, console=quiet())

    def test_more_workers_than_examples_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(DemoError, match="there are only 1437"):
            run_demo(small("127.0.0.1:1", tmp_path, batch_size=1000), console=quiet())


class TestServerProcess:
    def test_it_serves_and_shuts_down(self) -> None:
        with ServerProcess(timeout=PATIENCE_SECONDS) as server:
            assert server.address.startswith("127.0.0.1:")
            with gradserve.connect(server.address, timeout=PATIENCE_SECONDS) as client:
                accumulator = client.conditional_accumulator("float32", shape=(1,), shared_name="a")
                assert accumulator.num_accumulated() == 0

    def test_a_server_that_does_not_start_is_reported_with_its_log(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sys, "executable", str(script(tmp_path, "echo no memory left; exit 3")))
        with (
            pytest.raises(DemoError, match=r"ended with exit code 3 before it served.*\nno memory left"),
            ServerProcess(timeout=PATIENCE_SECONDS),
        ):
            pass

    def test_a_server_that_hangs_is_reported(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "executable", str(script(tmp_path, "exec sleep 60")))
        with pytest.raises(DemoError, match=r"did not start within 0\.1 seconds"), ServerProcess(timeout=0.1):
            pass

    def test_a_server_that_ends_badly_is_reported(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        # Like `-m gradserve_server serve --listen ... --address-file PATH`, where PATH comes seventh.
        lines = """trap 'echo lost my mind; exit 4' TERM
echo 127.0.0.1:1 >"$7"
while true; do sleep 0.05; done"""
        monkeypatch.setattr(sys, "executable", str(script(tmp_path, lines)))
        with (
            pytest.raises(DemoError, match=r"ended with exit code 4.*\nlost my mind"),
            ServerProcess(timeout=PATIENCE_SECONDS),
        ):
            pass


def script(folder: Path, lines: str) -> Path:
    path = folder / "server.sh"
    path.write_text(f"#!/bin/sh\n{lines}\n")
    path.chmod(0o755)
    return path


def training_result(accuracy: float, seconds: float = 1.0) -> TrainingResult:
    return TrainingResult((), (), {}, final_loss=0.1, final_accuracy=accuracy, seconds=seconds)


def report(
    *,
    backup: bool,
    sync_every: int = 1,
    difference: float = 0.0,
    accuracy: float = 0.98,
    seconds: tuple[float, float] = (1.0, 1.0),
) -> DemoReport:
    workers = tuple(
        WorkerResult(f"worker-{index}", slow=False, contributed=9, stale=0, killed_at=None)
        for index in range(3 if backup else 2)
    )
    return DemoReport(
        num_required=2,
        sync_every=sync_every,
        num_steps=10,
        distributed=training_result(accuracy, seconds[0]),
        single=training_result(0.98, seconds[1]),
        workers=workers,
        plot=Path("training.png"),
        max_weight_difference=difference,
    )


class TestReport:
    def test_without_backup_the_weights_must_agree(self) -> None:
        assert report(backup=False, difference=9e-6).problem is None
        assert "1.1e-05" in (report(backup=False, difference=1.1e-5).problem or "")
        assert report(backup=False, difference=float("nan")).problem

    def test_with_backup_the_accuracy_must_be_reached(self) -> None:
        assert report(backup=True, difference=1.0, accuracy=0.96).problem is None
        assert "4.0% below" in (report(backup=True, accuracy=0.94).problem or "")

    def test_by_diloco_the_accuracy_must_be_reached(self) -> None:
        assert report(backup=False, sync_every=10, difference=1.0, accuracy=0.96).problem is None
        assert "4.0% below" in (report(backup=False, sync_every=10, accuracy=0.94).problem or "")

    def test_slower_workers_are_explained(self) -> None:
        text = " ".join(shown(report(backup=False, seconds=(0.2, 0.005))).split())
        assert "2 workers are slower here because the network is tiny" in text
        assert "one process computes a step in 0.5 ms" in text
        assert "most of their 20.0 ms" in text
        assert "slower" not in shown(report(backup=False, seconds=(0.005, 0.2)))

    def test_a_problem_is_shown(self) -> None:
        assert "NOT AS EXPECTED" in shown(report(backup=False, difference=1.0))


class TestCommand:
    def test_it_starts_its_own_server_and_says_what_came_out(self, tmp_path: Path) -> None:
        arguments = ["--workers", "2", "--epochs", "1", "--output", str(tmp_path)]
        result = CliRunner().invoke(demo, arguments)
        assert result.exit_code == 0, result.output
        for words in ("2 workers", "one process", "test accuracy", "Same result", "Plot:"):
            assert words in result.output
        assert (tmp_path / "training.png").read_bytes().startswith(PNG_SIGNATURE)

    def test_runs_that_disagree_end_with_exit_code_1(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(coordinator, "run_demo", lambda *_, **__: report(backup=False, difference=1.0))
        result = CliRunner().invoke(demo, ["--output", str(tmp_path)])
        assert result.exit_code == 1
        assert "NOT AS EXPECTED" in result.output

    def test_an_error_ends_with_a_message_and_no_traceback(self, tmp_path: Path) -> None:
        blocked = tmp_path / "file"
        blocked.touch()
        result = CliRunner().invoke(demo, ["--output", str(blocked / "folder")])
        assert result.exit_code == 1
        assert "Error: " in result.output
        assert "Traceback" not in result.output

    def test_a_missing_extra_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "rich.console", None)
        result = CliRunner().invoke(demo, [])
        assert result.exit_code == 1
        assert f"the demo needs rich.console; install it with: {install_command('demo')}\n" in result.output
