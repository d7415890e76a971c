"""State directories that earlier versions wrote."""

import subprocess
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import gradserve
from gradserve_server.commands.cli import cli
from gradserve_server.storage.database import FORMAT
from gradserve_server.storage.journal import Durability
from gradserve_testing import LocalServer
from tests.golden.state_directory import (
    APPLY,
    FIRST_WITH_PARAMETERS,
    KRUM,
    LLM,
    UPDATE,
    X,
    archive_of,
    config_of,
    push_again,
)
from tests.parameters.bench import push
from tests.parameters.durable.disk import Disk
from tests.servers.raw_calls import RawCalls

ALL_FORMATS = range(1, FORMAT + 1)


def unpacked(version: int, folder: Path) -> Path:
    """Returns a directory in one format."""
    subprocess.run(["tar", "-xf", archive_of(version), "-C", folder], check=True)
    return folder / "state"


@pytest.fixture(params=ALL_FORMATS)
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return unpacked(request.param, tmp_path)


LISTED = """\
c/model: gradient, step 1, 1 gradients in the round, 1 averages
default/counter: round, step 41, 0 gradients in the round, 0 averages
default/plain: gradient, step 3, 0 gradients in the round, 2 averages
layer c/bn: 4 variables, 1 updates, 1 pending
"""


PARAMETERS = """\
parameters c/krum: round, step 1, 0 updates in the round, 2 versions
parameters default/llm: gradient, step 2, 1 updates in the round, 3 versions
"""


@pytest.mark.parametrize("version", ALL_FORMATS)
def test_it_is_listed(version: int, tmp_path: Path) -> None:
    directory = unpacked(version, tmp_path)
    result = CliRunner().invoke(cli, ["state", "check", str(directory)])
    parameters, count = (PARAMETERS, 2) if version >= FIRST_WITH_PARAMETERS else ("", 0)
    assert (result.exit_code, result.output) == (
        0,
        f"{LISTED}{parameters}{directory}: 3 accumulators, 1 layers, {count} parameters, nothing is damaged\n",
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


@pytest.mark.parametrize("version", range(FIRST_WITH_PARAMETERS, FORMAT + 1))
async def test_parameters_go_on(version: int, tmp_path: Path) -> None:
    disk = await Disk.open(unpacked(version, tmp_path), Durability.GRADIENT)
    llm, krum = disk.found(LLM), disk.found(KRUM)
    assert [(each.state.step, each.newest.digest.hex()) for each in (llm, krum)] == [
        (2, "a599adf0a89894a91723b01bdb2574dd"),
        (1, "07cf6e163997cae7043467e649ff7fbb"),
    ]
    assert llm.state.kept_steps == (0, 1, 2)
    records, _ = llm.records(0, 10)
    assert [(each.step, each.reason, [update.weight_asked for update in each.updates]) for each in records] == [
        (1, "grace", [1.0, 2.0]),
        (2, "expected", [3.0, 4.0]),
    ]
    pushed, duplicate = await push_again(llm)
    assert (duplicate, pushed.staleness, pushed.weight) == (True, 1, 0.5**0.5)
    disk.bench.now += 1000.0
    await push(llm, UPDATE, worker_id="w5")
    for number in range(2):
        await push(llm, UPDATE, worker_id=f"w{number}")
    for number in range(3):
        await push(krum, {"w": [number, 1]}, worker_id=f"w{number}")
    assert [(each.state.step, each.newest.digest.hex()) for each in (llm, krum)] == [
        (4, "134fa7ec350d3739b0bbf7359b92975a"),
        (2, "08556dc2839c372dee11eaef99ef1716"),
    ]
    disk.close()
