"""The demo with batch normalization: in NumPy, on the server, and in small real runs."""

import io
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console

import gradserve
from gradserve_demo import network
from gradserve_demo.command import demo
from gradserve_demo.coordinator import run_demo
from gradserve_demo.network import DECAY, EPSILON, BatchNormLayer, Weights
from gradserve_demo.options import DemoOptions
from gradserve_demo.report import WEIGHT_TOLERANCE
from gradserve_demo.served import ServedBatchNormLayer, create_layer


def small_network(dtype: type[np.floating]) -> Weights:
    weights = network.initial_weights(5, 4, 3, seed=1, dtype=dtype, batch_norm=True)
    generator = np.random.default_rng(2)
    changes = {name: generator.uniform(0.5, 1.5, 4).astype(dtype) for name in ("beta", "gamma")}
    return weights | changes


class TestNumpyLayer:
    @pytest.mark.parametrize("num_shares", [1, 3])
    def test_gradients_are_those_of_numeric_differentiation(self, num_shares: int) -> None:
        generator = np.random.default_rng(0)
        weights = small_network(np.float64)
        images, labels = generator.uniform(0, 1, (12, 5)), generator.integers(0, 3, 12)
        layer = BatchNormLayer(4, num_shares, np.float64)
        _, gradients = network.loss_and_gradients(weights, images, labels, layer)
        assert gradients.keys() == weights.keys()

        delta = 1e-6
        for name, value in weights.items():
            for index in np.ndindex(value.shape):
                losses = []
                for sign in (1, -1):
                    moved = value.copy()
                    moved[index] += sign * delta
                    loss, _ = network.loss_and_gradients({**weights, name: moved}, images, labels, layer)
                    losses.append(loss)
                numeric = (losses[0] - losses[1]) / (2 * delta)
                assert gradients[name][index] == pytest.approx(numeric, abs=1e-7), (name, index)

    @pytest.mark.parametrize("dtype", [np.float32, np.float64])
    def test_everything_has_the_type_of_the_weights(self, dtype: type[np.floating]) -> None:
        weights, layer = small_network(dtype), BatchNormLayer(4, 1, dtype)
        images = np.random.default_rng(0).uniform(0, 1, (3, 5)).astype(dtype)
        _, gradients = network.loss_and_gradients(weights, images, np.array([0, 1, 2]), layer)
        layer.end_step(weights)
        assert {value.dtype for value in (*gradients.values(), *layer.state().values())} == {np.dtype(dtype)}

    def test_a_joint_batch_is_the_shares_of_its_workers(self) -> None:
        generator = np.random.default_rng(0)
        weights = small_network(np.float64)
        images, labels = generator.uniform(0, 1, (12, 5)), generator.integers(0, 3, 12)
        joint, alone = BatchNormLayer(4, 3, np.float64), BatchNormLayer(4, 1, np.float64)
        _, gradients = network.loss_and_gradients(weights, images, labels, joint)
        joint.end_step(weights)
        shares = []
        for rows in (slice(0, 4), slice(4, 8), slice(8, 12)):
            shares.append(network.loss_and_gradients(weights, images[rows], labels[rows], alone)[1])
            alone.end_step(weights)
        for name, value in gradients.items():
            np.testing.assert_allclose(value, np.mean([share[name] for share in shares], axis=0), atol=1e-12)
        for name, value in joint.state().items():
            np.testing.assert_array_equal(value, alone.state()[name])

    @pytest.mark.parametrize(("count", "factor"), [(4, 4 / 3), (1, 1)])
    def test_the_moving_averages_follow_mean_and_sample_variance(self, count: int, factor: float) -> None:
        inputs = np.random.default_rng(0).normal(3, 2, (count, 4))
        weights, layer = small_network(np.float64), BatchNormLayer(4, 1, np.float64)
        layer.forward(weights, inputs)
        layer.end_step(weights)
        state = layer.state()
        np.testing.assert_allclose(state["moving_mean"], (1 - DECAY) * inputs.mean(axis=0))
        np.testing.assert_allclose(state["moving_variance"], DECAY + (1 - DECAY) * factor * inputs.var(axis=0))
        expected = weights["gamma"] * (inputs - state["moving_mean"]) / np.sqrt(state["moving_variance"] + EPSILON)
        np.testing.assert_allclose(layer.infer(weights | state, inputs), np.maximum(expected + weights["beta"], 0))


class TestServedLayer:
    """Workers side by side in one thread, so who comes first is not left to chance."""

    @pytest.mark.parametrize("order", [(0,), (0, 1, 2), (2, 0, 1)], ids=str)
    def test_it_is_the_numpy_layer(self, client: gradserve.Client, name: str, order: tuple[int, ...]) -> None:
        num_workers = len(order)
        workers = [
            ServedBatchNormLayer(client, name, 4, worker=worker, num_workers=num_workers)
            for worker in range(num_workers)
        ]
        local = BatchNormLayer(4, num_workers)
        generator = np.random.default_rng(0)
        weights: Weights = {"beta": np.zeros(4, np.float32), "gamma": np.ones(4, np.float32)}
        for _ in range(3):
            shares, d_shares = generator.normal(3, 2, (2, num_workers, 8, 4)).astype(np.float32)
            expected, backward = local.forward(weights, shares.reshape(-1, 4))
            expected_inputs, expected_weights = backward(d_shares.reshape(-1, 4))
            calls = {worker: workers[worker].forward(weights, shares[worker]) for worker in order}
            found = [calls[worker][1](d_shares[worker]) for worker in range(num_workers)]
            close(np.concatenate([calls[worker][0] for worker in range(num_workers)]), expected)
            close(np.concatenate([d_inputs for d_inputs, _ in found]), expected_inputs)
            for weight, value in expected_weights.items():
                close(np.sum([gradients[weight] for _, gradients in found], axis=0), value)

            weights = {weight: weights[weight] - np.float32(0.1) * value for weight, value in expected_weights.items()}
            local.end_step(weights)
            for worker in order:
                workers[worker].end_step(weights)
                test = generator.normal(3, 2, (5, 4)).astype(np.float32)
                close(workers[worker].infer(weights, test), local.infer(weights | local.state(), test))
                served = workers[worker].state()
                assert served.keys() == {*weights, *local.state()}
                for variable, value in (weights | local.state()).items():
                    close(served[variable], value)
        layer = create_layer(client, name, 4)
        info = layer.describe()
        # Whatever each of the workers says, a forward counts once; and nothing is left behind.
        assert (info.num_updates, info.num_forwards) == (3 * num_workers, 0)
        layer.delete()


def close(found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


class TestRun:
    @pytest.mark.parametrize(("workers", "batch_size"), [(1, 80), (4, 20)])
    def test_workers_and_one_process_end_with_equal_variables(
        self, server_address: str, tmp_path: Path, client: gradserve.Client, workers: int, batch_size: int
    ) -> None:
        options = DemoOptions(
            workers=workers,
            batch_norm=True,
            epochs=3,
            batch_size=batch_size,
            address=server_address,
            output=tmp_path,
        )
        report = run_demo(options, console=Console(file=io.StringIO()))

        assert report.problem is None
        assert report.max_weight_difference <= WEIGHT_TOLERANCE
        names = {"hidden_weight", "output_weight", "output_bias", "beta", "gamma", "moving_mean", "moving_variance"}
        assert report.distributed.weights.keys() == report.single.weights.keys() == names
        assert report.num_steps == 51
        np.testing.assert_allclose(report.distributed.losses, report.single.losses, rtol=1e-4)
        # The points are the served layer's, the last number is NumPy's with its moving averages.
        assert report.distributed.accuracies == report.single.accuracies
        assert report.distributed.final_accuracy == report.distributed.accuracies[-1].accuracy
        accuracies = [point.accuracy for point in report.distributed.accuracies]
        assert all(later > earlier for earlier, later in pairwise(accuracies[:3]))
        assert accuracies[-1] > 0.9
        # Nothing of this run is left on the server.
        assert not client.list_batch_norm_layers(scope="demo-")


class TestCommand:
    def test_the_flag_makes_it_so(self, server_address: str, tmp_path: Path) -> None:
        arguments = ["--batch-norm", "--workers", "2", "--epochs", "1"]
        result = CliRunner().invoke(demo, [*arguments, "--address", server_address, "--output", str(tmp_path)])
        assert result.exit_code == 0, result.output
        assert "Same result: the weights and moving averages" in " ".join(result.output.split())

    @pytest.mark.parametrize(("flags", "options"), [(["--backup", "1"], {"backup": 1}), (["--kill"], {"kill": True})])
    def test_workers_that_may_be_missing_are_refused(
        self, tmp_path: Path, flags: list[str], options: dict[str, Any]
    ) -> None:
        result = CliRunner().invoke(demo, ["--batch-norm", *flags, "--output", str(tmp_path / "new")])
        assert result.exit_code == 2
        assert "--batch-norm needs every worker in every step" in " ".join(result.output.split())
        assert not (tmp_path / "new").exists()
        with pytest.raises(ValueError, match="batch_norm needs"):
            DemoOptions(batch_norm=True, **options)
