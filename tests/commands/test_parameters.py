"""`gradserve parameters save`, and parameters in `ls`, `show`, `rm` and `top`."""

import math
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

import numpy as np
import pytest

import gradserve
from gradserve_protocol.server_status import ParametersStatus, WeightStatus
from gradserve_server.commands import parameters as parameters_command
from tests.cluster.servers import addresses_of, name_at, running_cluster
from tests.commands.conftest import CommandLine
from tests.servers.polling import PATIENCE_SECONDS, eventually

UPDATE = {"w": np.ones(3, np.float32)}


def made(client: gradserve.Client, name: str, num_required: int = 2) -> gradserve.Parameters:
    return client.parameters(
        {"w": np.zeros(3, np.float32)},
        shared_name=name,
        num_required=num_required,
        max_staleness=1,
        optimizer=gradserve.optim.SGD(0.5, momentum=0.9),
    )


@pytest.fixture(scope="package")
def moved(client: gradserve.Client) -> str:
    """Returns the name of parameters with two rounds: "c" was stale in the second, and "b" was refused."""
    found = made(client, "moved/net")
    for local_step, worker, weight in ((0, "a", 2.0), (0, "b", 2.0), (0, "c", 1.0), (1, "a", 1.0)):
        found.push(UPDATE, local_step, worker_id=worker, weight=weight, metrics={"loss": 4 - weight, worker: 0.5})
    found.report({"loss": 0.25, "low": math.nan}, 1)
    found.push(UPDATE, 0, worker_id="b")
    found.push(UPDATE, 2, worker_id="b", weight=4.0)
    return "moved/net"


@pytest.mark.parametrize("kind", ["parameters", "Parameter"])
def test_parameters_are_listed(command_line: CommandLine, moved: str, kind: str) -> None:
    header, line = command_line.run("ls", kind, "--name", moved).stdout.splitlines()
    assert header.split()[:3] == ["CONTAINER", "NAME", "STEP"]
    assert line.split()[:3] == ["default", moved, "2"]
    assert line.endswith("sgd(lr=0.5, momentum=0.9)  2 updates")
    listed = command_line.json("ls", "parameters", "--name", moved)
    assert listed["num_parameters"] == 1
    (found,) = listed["parameters"]
    assert (found["step"], found["num_updates"], found["num_required"]) == (2, 1, 2)
    assert (found["num_counted"], found["num_live"], found["num_ended"]) == (2, 3, {"required": 2})


def test_parameters_are_shown_with_their_weights_and_rounds(command_line: CommandLine, moved: str) -> None:
    lines = command_line.run("show", "parameters", moved).stdout.splitlines()
    assert lines[0].startswith(f"default/{moved}: step 2, 1 component, ")
    assert "optimizer: sgd(lr=0.5, momentum=0.9), learning rate 0.5" in lines
    assert "rules: 2 updates" in lines
    assert "weight: 10 accepted = 6 applied + 4 pending; refused: 1 stale" in lines
    assert "latest round: updates of 2 of 3 live workers" in lines
    assert "metrics of the latest round: a 0.5, c 0.5, loss 3" in lines
    assert "evaluation of step 1: loss 0.25, low nan" in lines
    latest, first = lines[-2:]
    assert latest.split()[0] == "2"
    assert latest.split()[4:] == ["required", "2", "2", "up", "to", "1", "0", "c,", "a"]
    assert first.split()[4:] == ["required", "2", "4", "0", "0", "a,", "b"]


def test_parameters_are_shown_as_json(command_line: CommandLine, moved: str) -> None:
    found = command_line.json("show", "parameters", moved)
    assert found["info"]["rules"]["num_required"] == 2
    assert found["status"]["weights"]["pending"] == 4.0
    assert [each["step"] for each in found["rounds"]] == [1, 2]
    assert [each["metrics"]["loss"] for each in found["rounds"]] == [2, 3]
    assert found["rounds"][0]["evaluation"]["metrics"] == {"loss": 0.25, "low": None}


def test_private_parameters_are_shown_without_records(command_line: CommandLine, client: gradserve.Client) -> None:
    private = client.parameters({"w": np.zeros(3, np.float32)}, name="mine")
    assert "private to a client" in command_line.run("show", "parameters", private.name).stdout
    done = command_line.run("parameters", "save", private.name, "never")
    assert (done.exit_code, "are private to a client" in done.stderr) == (1, True)
    private.delete()


def test_parameters_are_deleted(command_line: CommandLine, client: gradserve.Client) -> None:
    made(client, "unwanted")
    done = command_line.run("rm", "parameters", "unwanted", answer="y\n")
    assert (done.exit_code, done.stdout) == (0, "deleted unwanted\n")
    assert "Delete parameters unwanted of " in done.stderr
    done = command_line.run("rm", "parameters", "unwanted", "--yes")
    assert (done.exit_code, done.stdout) == (1, "")
    assert "no parameters unwanted on " in done.stderr


def test_an_accumulator_of_the_same_name_is_another_thing(command_line: CommandLine, client: gradserve.Client) -> None:
    made(client, "twins")
    client.conditional_accumulator("float32", (), shared_name="twins")
    assert command_line.run("rm", "accumulator", "twins", "--yes").exit_code == 0
    assert command_line.json("ls", "parameters", "--name", "default/twins")["num_parameters"] == 1
    assert command_line.json("ls", "accumulators", "--name", "default/twins")["num_accumulators"] == 0


def test_a_picture_has_parameters(command_line: CommandLine, moved: str) -> None:
    lines = command_line.run("top", "--name", moved).stdout.splitlines()
    assert any(line.split()[:2] == [moved, "2"] for line in lines)
    (found,) = command_line.json("top", "--name", moved)["parameters"]
    assert [each["reason"] for each in found["rounds"]] == ["required", "required", ""]
    assert [[each["staleness"] for each in described["arrivals"]] for described in found["rounds"][1:]] == [[1, 0], [0]]


@pytest.mark.parametrize(("option", "slots"), [((), ["momentum_buffer"]), (("--no-optimizer",), [])])
def test_parameters_are_saved(
    command_line: CommandLine, moved: str, tmp_path: Path, option: tuple[str, ...], slots: list[str]
) -> None:
    done = command_line.run("parameters", "save", moved, str(tmp_path / "net.safetensors"), *option)
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith(f"{tmp_path / 'net.safetensors'}: step 2, ")
    saved = gradserve.load_parameters(tmp_path / "net.safetensors")
    assert saved.step == 2
    assert [slot for slot, _ in saved.state.slots] == slots if saved.state else not slots
    assert [each.name for each in tmp_path.iterdir()] == ["net.safetensors"]


def test_the_step_can_be_in_the_name_of_the_file(command_line: CommandLine, moved: str, tmp_path: Path) -> None:
    done = command_line.run("parameters", "save", moved, str(tmp_path / "net-{step}.safetensors"))
    assert done.stdout.startswith(f"{tmp_path / 'net-2.safetensors'}: step 2, ")
    assert [each.name for each in tmp_path.iterdir()] == ["net-2.safetensors"]


@pytest.mark.parametrize(
    ("arguments", "exit_code", "message"),
    [
        (("nothing", "file"), 1, "no parameters default/nothing on "),
        (("moved/net", "no such folder/file"), 1, "No such file or directory"),
        (("moved/net", "file", "--keep", "3"), 2, "--keep is for --every with {step} in the name of FILE"),
        (("moved/net", "file", "--every", "0"), 2, "is not in the range"),
        (("moved/net",), 2, "Missing argument 'FILE'"),
    ],
)
def test_what_cannot_be_saved_is_named(
    command_line: CommandLine, moved: str, arguments: tuple[str, ...], exit_code: int, message: str
) -> None:
    assert moved == "moved/net"
    done = command_line.run("parameters", "save", *arguments)
    assert (done.exit_code, message in done.stderr) == (exit_code, True), done.output


def test_parameters_are_saved_again_and_again(
    command_line: CommandLine, client: gradserve.Client, tmp_path: Path
) -> None:
    found = made(client, "again", num_required=1)
    file = str(tmp_path / "{step}.safetensors")
    command = [sys.executable, "-m", "gradserve_server", "parameters", "save", "again", file, command_line.address]
    with subprocess.Popen([*command, "--every", "1", "--keep", "2"], stdout=subprocess.PIPE, text=True) as saving:
        try:
            for step in (1, 2, 3):
                found.push(UPDATE, step - 1)
                eventually((tmp_path / f"{step}.safetensors").exists)
            assert saving.stdout is not None
            lines = [*takewhile(lambda line: "step 3" not in line, saving.stdout), "step 3"]
            saving.send_signal(signal.SIGINT)  # not before that line: older files are deleted before it
            output = "".join([*lines, saving.communicate(timeout=PATIENCE_SECONDS)[0]])
        finally:
            saving.kill()
    assert saving.returncode == 0
    assert {each.name for each in tmp_path.iterdir()} == {"2.safetensors", "3.safetensors"}
    assert output.count("step 3") == 1, "a step that was saved is left out"


@pytest.mark.parametrize(
    ("weights", "line"),
    [
        (WeightStatus(3.0, 1.0, 2.0), "weight: 3 accepted = 1 applied + 2 pending"),
        (WeightStatus(3.0, 1.0, 1.0, 1.0), "weight: 3 accepted = 1 applied + 1 pending + 1 dropped at a load"),
        (WeightStatus(3.0, 1.0, 1.5), "weight: 3 accepted = 1 applied + 1.5 pending + 0.5 LOST"),
        (WeightStatus(0.3, 0.1, 0.2 - 1e-16), "weight: 0.3 accepted = 0.1 applied + 0.2 pending"),
    ],
)
def test_weight_that_is_lost_is_named(weights: WeightStatus, line: str) -> None:
    assert parameters_command.weights_line(weights) == line


def test_participation_is_empty_while_it_is_unknown() -> None:
    assert parameters_command.participation(ParametersStatus()) == ""
    assert parameters_command.participation(ParametersStatus(num_counted=2, num_live=3)) == "2 of 3"


@pytest.fixture(scope="module")
def two_servers() -> Iterator[list[str]]:
    with running_cluster(2) as servers:
        yield addresses_of(servers)


@pytest.mark.parametrize("home", [0, 1])
def test_parameters_of_a_cluster_are_saved_from_their_home(two_servers: list[str], tmp_path: Path, home: int) -> None:
    name = name_at(home, 2, "saved-")
    line = CommandLine(",".join(two_servers))
    with gradserve.connect(two_servers) as client:
        found = made(client, name, num_required=1)
        digest = found.push_pull(UPDATE, 0).version.digest
    (listed,) = line.json("ls", "parameters", "--name", name)["parameters"]
    assert (listed["server"], listed["step"]) == (home, 1)
    done = line.run("parameters", "save", name, str(tmp_path / "{step}"))
    assert (done.exit_code, done.stdout.startswith(f"{tmp_path}/1: step 1, ")) == (0, True), done.output
    saved = gradserve.load_parameters(tmp_path / "1")
    assert (saved.step, saved.digest, saved.state is not None) == (1, digest, True)
    done = line.run("parameters", "save", "nobody", str(tmp_path / "never"))
    assert (done.exit_code, "no parameters default/nobody" in done.stderr) == (1, True)
