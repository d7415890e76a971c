"""`gradserve ls`, `show` and `rm`."""

import numpy as np
import pytest

import gradserve
from gradserve_protocol.server_status import AccumulatorStatus, ArrivalStatus, RoundStatus
from gradserve_server.commands import resources
from tests.commands.conftest import CommandLine


@pytest.mark.parametrize("kind", [(), ("accumulators",), ("accumulator",), ("Accumulators",)])
def test_accumulators_are_listed(command_line: CommandLine, trained: str, kind: tuple[str, ...]) -> None:
    done = command_line.run("ls", *kind, "--name", "RAINED/N")
    assert done.exit_code == 0
    header, line = done.stdout.splitlines()
    assert header.split()[:3] == ["CONTAINER", "NAME", "STEP"]
    assert line.split()[:3] == ["default", trained, "2"]


def test_accumulators_are_listed_as_json(command_line: CommandLine, trained: str) -> None:
    (found,) = command_line.json("ls", "--name", trained)["accumulators"]
    assert (found["container"], found["name"], found["accepted"], found["stale"]) == ("default", trained, 4, 1)


def test_all_containers_are_listed_unless_one_is_named(command_line: CommandLine, client: gradserve.Client) -> None:
    for container in ("listed a", "listed b"):
        client.conditional_accumulator("float32", (), shared_name="listed", container=container)
    everywhere = command_line.json("ls", "--name", "/listed")["accumulators"]
    assert [each["container"] for each in everywhere] == ["listed a", "listed b"]
    (one,) = command_line.json("ls", "--container", "listed b")["accumulators"]
    assert one["container"] == "listed b"


def test_tensors_and_layers_are_listed_shown_and_deleted(command_line: CommandLine, client: gradserve.Client) -> None:
    handle = client.put(np.zeros((2, 3), np.float32))
    client.batch_norm(scope="commands/bn", input_shape=(None, 3), dtype="float32")
    line = next(each for each in command_line.run("ls", "tensors").stdout.splitlines() if handle.handle in each)
    assert line.split(maxsplit=1)[1].strip() == "float32  [2, 3]  24 B"
    assert command_line.run("show", "tensor", handle.handle).stdout == "float32 [2, 3]\n"
    assert "commands/bn" in command_line.run("ls", "layers", "--name", "COMMANDS/B").stdout
    assert command_line.json("ls", "layers", "--name", "commands/bn")["num_layers"] == 1
    assert command_line.run("ls", "layers", "--name", "no such layer").stdout == "no layers\n"
    shown = command_line.run("show", "layer", "commands/bn").stdout
    assert shown.startswith("default/commands/bn: ")
    assert "moving_mean" in shown
    assert command_line.json("show", "layer", "commands/bn")["layer"]["num_updates"] == 0
    for kind, name in (("tensor", handle.handle), ("layer", "commands/bn")):
        assert command_line.run("rm", kind, name, "--yes").stdout == f"deleted {name}\n"
        done = command_line.run("rm", kind, name, "--yes")
        assert (done.exit_code, done.stdout) == (1, "")
        assert f"no {kind}s {name} on " in done.stderr


def test_an_accumulator_is_shown_with_its_rounds(command_line: CommandLine, trained: str) -> None:
    lines = command_line.run("show", "accumulator", trained).stdout.splitlines()
    assert lines[0].startswith(f"default/{trained}: step 2, ")
    assert lines[1].startswith("current round: 1 gradients")
    assert lines[2] == "  from fast"
    assert lines[3].startswith("since the server started: 4 gradients accepted, 1 stale, 0 duplicate, 0 refused")
    latest, first = lines[-2:]
    assert latest.split()[0] == "2"
    assert latest.split()[-2:] == ["slow", "slow"], "it was too late, and missing"
    assert first.split()[0] == "1"
    assert "slow after" in first


def test_what_is_not_there_cannot_be_shown(command_line: CommandLine) -> None:
    for kind in ("accumulator", "parameters", "layer", "tensor"):
        done = command_line.run("show", kind, "nothing")
        assert done.exit_code == 1
        assert f"no {kind} " in done.stderr


def test_deleting_asks_first(command_line: CommandLine, client: gradserve.Client) -> None:
    client.conditional_accumulator("float32", (), shared_name="asked")
    done = command_line.run("rm", "accumulator", "asked", answer="n\n")
    assert (done.exit_code, done.stdout) == (1, "")
    assert f"Delete accumulator asked of {command_line.address}?" in done.stderr
    done = command_line.run("rm", "accumulator", "asked", answer="y\n")
    assert (done.exit_code, done.stdout) == (0, "deleted asked\n")
    assert command_line.json("ls", "--name", "default/asked")["accumulators"] == []


def test_what_is_there_is_deleted_even_if_something_else_is_not(
    command_line: CommandLine, client: gradserve.Client
) -> None:
    client.conditional_accumulator("float32", (), shared_name="half")
    done = command_line.run("rm", "accumulators", "missing", "half", "--yes", "--json")
    assert done.exit_code == 1
    assert '"missing": false' in done.stdout
    assert '"half": true' in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("ls", "things"), "expected accumulators, parameters, layers or tensors, got 'things'"),
        (("ls", "tensors", "--name", "x"), "--container and --name are for accumulators, parameters and layers"),
        (("rm", "accumulator"), "Missing argument 'NAME...'"),
        (("show",), "Missing argument"),
        (("ls", "--address", "nonsense:99999"), "a port is a number from 1 to 65535"),
        (("bench", "--size", "huge"), "expected a size from 4KiB to 1GiB, such as 10MiB, got 'huge'"),
        (("bench", "--size", "1"), "expected a size from 4KiB to 1GiB"),
        (("bench", "--way", "pigeon"), "'pigeon' is not one of"),
        (("top", "--interval", "0"), "0.0 is not in the range"),
        (("completion", "tcsh"), "'tcsh' is not one of"),
    ],
)
def test_a_mistake_is_named(command_line: CommandLine, arguments: tuple[str, ...], message: str) -> None:
    done = command_line.run(*arguments)
    assert done.exit_code == 2
    assert message in done.stderr


@pytest.mark.parametrize("command", [("ls",), ("show", "accumulator", "x"), ("bench",), ("top", "--json")])
def test_a_server_that_is_not_there_is_an_error_of_one_line(command: tuple[str, ...]) -> None:
    done = CommandLine("localhost:1").run(*command)
    assert done.exit_code == 1
    assert done.stderr.startswith("Error: localhost:1: ")
    assert done.stderr.count("\n") == 1


def _status(opened: float | None) -> AccumulatorStatus:
    """The status, 100 s after the start, of an accumulator whose rounds take a second, with one open since then."""
    ended = RoundStatus(1, began=10.0, ended=11.0, arrivals=(ArrivalStatus("a"), ArrivalStatus("b", 1.0)))
    current = () if opened is None else (RoundStatus(2, began=opened, arrivals=(ArrivalStatus("a"),)),)
    return AccumulatorStatus(
        "default", "net", median_round_seconds=1.0, missing=("b",), rounds=(ended, *current), num_accumulated=1
    )


@pytest.mark.parametrize(("opened", "names_b"), [(None, False), (99.9, False), (97.5, False), (96.5, True)])
def test_who_is_missing_is_said_of_a_round_alone_that_lasts_longer_than_others(
    client: gradserve.Client, opened: float | None, names_b: bool
) -> None:
    client.conditional_accumulator("float32", (), shared_name="missing/net")
    (info,) = (each for each in client.list_accumulators() if each.name == "missing/net")
    lines = resources._accumulator(info, _status(opened), 100.0)
    assert ("  missing from the round before: b" in lines) == names_b


def test_workers_with_other_parameters_are_named(client: gradserve.Client) -> None:
    client.conditional_accumulator("float32", (), shared_name="different/net")
    (info,) = (each for each in client.list_accumulators() if each.name == "different/net")
    status = AccumulatorStatus(
        different={"a": 4, "b": -1}, num_compared=8, compared_step=9, different_since={"a": 5, "b": 7}
    )
    lines = resources._accumulator(info, status, 100.0)
    assert (
        "  with other parameters than most: a (since step 5, equal at step 4), b (since step 7); 8 workers compared at "
        "step 9"
    ) in lines


def test_equal_weights_are_said(client: gradserve.Client) -> None:
    client.conditional_accumulator("float32", (), shared_name="equal/net")
    (info,) = (each for each in client.list_accumulators() if each.name == "equal/net")
    lines = resources._accumulator(info, AccumulatorStatus(num_compared=8, compared_step=0), 100.0)
    assert "  weights equal on 8 workers at step 0" in lines
    lines = resources._accumulator(info, AccumulatorStatus(), 100.0)
    assert not any("weights" in line for line in lines)


def test_info_shows_the_versions_of_both_sides(command_line: CommandLine) -> None:
    first = command_line.run("info").stdout.splitlines()[0]
    version = gradserve.__version__
    assert first.startswith(f"gradserve {version}, up ")
    assert first.endswith(f"; this client is {version}")


def test_the_help_shows_whether_a_kind_is_needed(command_line: CommandLine) -> None:
    kinds = "accumulators|parameters|layers|tensors"
    assert f"{{{kinds}}} NAME" in " ".join(command_line.run("show", "--help").stdout.split())
    assert f"[{kinds}]" in " ".join(command_line.run("ls", "--help").stdout.split())
