"""State directories that earlier versions wrote."""

import subprocess
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import gradserve
from gradserve_server.commands.cli import cli
from gradserve_server.storage.database import FORMAT
from gradserve_testing import LocalServer
from tests.golden.state_directory import APPLY, X, archive_of, config_of
from tests.servers.raw_calls import RawCalls

ALL_FORMATS = range(1, FORMAT + 1)


@pytest.fixture(params=ALL_FORMATS)
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    subprocess.run(["tar", "-xf", archive_of(request.param), "-C", tmp_path], check=True)
    return tmp_path / "state"


LISTED = """\
c/model: gradient, step 1, 1 gradients in the round, 1 averages
default/counter: round, step 41, 0 gradients in the round, 0 averages
default/plain: gradient, step 3, 0 gradients in the round, 2 averages
layer c/bn: 4 variables, 1 updates, 1 pending
"""


def test_it_is_listed(directory: Path) -> None:
    result = CliRunner().invoke(cli, ["state", "check", str(directory)])
    assert (result.exit_code, result.output) == (
        0,
        f"{LISTED}{directory}: 3 accumulators, 1 layers, nothing is damaged\n",
    )


def test_training_goes_on(directory: Path) -> None:
    with LocalServer(config_of(directory)) as server, gradserve.connect(server.address) as client:
        plain = client.conditional_accumulator("bfloat16", (2, 3), shared_name="plain", keep_averages=2)
        assert [plain.read_average(step).astype(np.float64).tolist() for step in (2, 3)] == [
            [[1] * 3] * 2,
            [[2] * 3] * 2,
        ]
        assert client.conditional_accumulator("float64", (), shared_name="counter").info().global_step == 41
        assert {each.agreement == {} for each in client.list_accumulators()} == {True}  # there were none
        with RawCalls(server.address) as raw:
            again = raw.call("ApplyGradient", APPLY)
        assert (again.duplicate, again.num_accumulated) == (True, 1)
        template = {"w": np.ones(3, np.float32), "b": gradserve.SparseSpec("float64")}
        model = client.gradient_accumulator(template, shared_name="model", container="c", deterministic=True)
        average = model.take_grad(1)
        rows = average["b"]
        assert average["w"].tolist() == [1, 2, 3]
        assert isinstance(rows, gradserve.IndexedSlices)
        assert (rows.indices.tolist(), rows.values.tolist()) == ([5], [[7, 8]])
        layer = client.batch_norm(scope="bn", container="c", scale=True)
        assert layer.run_updates(["second"]) == 1
        decay, mean = 0.999, X.mean(axis=0)
        expected = decay * (1 - decay) * mean + (1 - decay) * 2 * mean
        np.testing.assert_allclose(layer.get_variables("moving_mean")["moving_mean"], expected, rtol=1e-6)
