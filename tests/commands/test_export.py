"""`gradserve export`: rounds in JSON Lines, TensorBoard and Weights & Biases, each once, also after an interruption."""

import fcntl
import json
import math
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import gradserve
from gradserve_protocol.server_status import AccumulatorStatus, ArrivalStatus, RoundStatus
from gradserve_server.commands.export.rounds import (
    Evaluation,
    Gradient,
    LateGradient,
    Look,
    Mark,
    Round,
    Subject,
    rounds_of_accumulator,
)
from gradserve_server.commands.export.targets import points_of_evaluation, points_of_round
from tests.cluster.servers import addresses_of, name_at, running_cluster
from tests.commands.conftest import CommandLine
from tests.servers.polling import PATIENCE_SECONDS, eventually
from tests.servers.restarting import RestartingServer

UPDATE = {"w": np.ones(3, np.float32)}
SUBJECT = Subject("accumulator", "default", "net", "1")


def made(client: gradserve.Client, name: str, **options: Any) -> gradserve.Parameters:
    return client.parameters(
        {"w": np.zeros(3, np.float32)}, shared_name=name, optimizer=gradserve.optim.SGD(0.5), **options
    )


def push(found: gradserve.Parameters, first: int, number: int = 1) -> None:
    """Ends so many rounds, the first of them from this step."""
    for step in range(first, first + number):
        found.push(UPDATE, step, worker_id="a", metrics={"loss": 1 / (step + 1)})


def lines_of(file: Path) -> Sequence[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def steps_of(file: Path, record: str = "round") -> Sequence[int]:
    return [each["step"] for each in lines_of(file) if each["record"] == record]


def whole_lines(file: Path) -> int:
    return file.read_text().count("\n") if file.exists() else 0


# What is exported


def test_a_round_of_parameters_has_its_losses_norms_and_waits(
    command_line: CommandLine, client: gradserve.Client, tmp_path: Path
) -> None:
    found = made(client, "exported", num_required=2, clip_norm=10.0)
    for worker, weight in (("a", 1.0), ("b", 3.0)):
        found.push(UPDATE, 0, worker_id=worker, weight=weight, metrics={"loss": weight})
    found.push(UPDATE, 0, worker_id="late")
    for worker in ("a", "c"):
        found.push(UPDATE, 1, worker_id=worker)
    found.report({"accuracy": 0.25, "low": math.nan}, 1)
    file = tmp_path / "rounds.jsonl"
    done = command_line.run("export", "parameters", "exported", "--jsonl", str(file))
    assert (done.exit_code, done.stdout, done.stderr) == (0, f"{file}: 2 rounds, 1 evaluations\n", "")
    first, second, evaluation = lines_of(file)
    assert (first["record"], first["kind"], first["container"], first["name"], first["step"]) == (
        ("round", "parameters", "default", "exported", 1)
    )
    assert (first["num_counted"], first["num_required"], first["reason"]) == (2, 2, "required")
    assert (first["learning_rate"], first["metrics"], first["late"]) == (0.5, {"loss": 2.5}, [])
    a, b = first["gradients"]
    assert (a["worker_id"], a["weight"], a["staleness"], a["metrics"]) == ("a", 1.0, 0, {"loss": 1.0})
    assert a["norm"] == pytest.approx(math.sqrt(3))
    assert (a["after"], a["waited"]) == (0.0, None)
    assert b["waited"] == b["after"] > 0, "the round had all updates but b's"
    assert first["seconds"] >= b["after"]
    assert first["step_seconds"] is None, "nobody knows when the first step began"
    assert second["late"] == [{"worker_id": "late", "reason": "stale"}]
    assert second["missing"] == ["b"]
    assert second["step_seconds"] == pytest.approx(second["ended"] - first["ended"])
    assert (evaluation["record"], evaluation["step"], evaluation["metrics"]) == (
        ("evaluation", 1, {"accuracy": 0.25, "low": None})
    )


def test_a_round_of_an_accumulator_has_its_arrivals(
    command_line: CommandLine, client: gradserve.Client, tmp_path: Path
) -> None:
    net = client.conditional_accumulator("float32", (), shared_name="exported/net")
    for step, workers in enumerate((["fast", "slow"], ["fast"])):
        for worker in workers:
            net.apply_grad(np.float32(1), local_step=step, worker_id=worker)
        net.take_grad(len(workers))
    net.apply_grad(np.float32(1), local_step=1, worker_id="slow")
    net.apply_grad(np.float32(1), local_step=2, worker_id="fast")
    file = tmp_path / "rounds.jsonl"
    done = command_line.run("export", "accumulator", "exported/net", "--jsonl", str(file))
    assert done.exit_code == 0, done.output
    first, second = lines_of(file)
    assert [each["worker_id"] for each in first["gradients"]] == ["fast", "slow"]
    assert first["gradients"][1]["waited"] == first["gradients"][1]["after"]
    assert (second["num_counted"], second["num_required"], second["missing"]) == (1, 1, ["slow"])
    assert second["late"] == [], "it came while the third round was open"
    net.take_grad(1)
    command_line.run("export", "accumulator", "exported/net", "--jsonl", str(file))
    assert lines_of(file)[-1]["late"] == [{"worker_id": "slow", "reason": "stale"}]


def test_single_workers_can_be_left_out(command_line: CommandLine, client: gradserve.Client, tmp_path: Path) -> None:
    push(made(client, "anonymous"), 0)
    file = tmp_path / "rounds.jsonl"
    command_line.run("export", "parameters", "anonymous", "--jsonl", str(file), "--no-workers")
    (line,) = lines_of(file)
    assert (line["gradients"], line["num_counted"], line["metrics"]) == ([], 1, {"loss": 1.0})


def test_a_late_gradient_counts_in_the_round_that_was_open_when_it_came() -> None:
    late = ArrivalStatus("slow", after=2.5, stale=True)
    status = AccumulatorStatus(
        rounds=(
            RoundStatus(1, began=1.0, ended=2.0, num_required=1, arrivals=(ArrivalStatus("a"), late)),
            RoundStatus(2, began=2.2, ended=3.0, num_required=1, arrivals=(ArrivalStatus("a"),)),
            RoundStatus(3, began=3.2, ended=4.0, num_required=1, arrivals=(ArrivalStatus("a"),)),
            RoundStatus(4, began=4.2, num_required=1, arrivals=(ArrivalStatus("a"),)),
        )
    )
    rounds = rounds_of_accumulator(status, 100.0)
    assert [each.step for each in rounds] == [1, 2, 3], "the last one is open"
    assert [each.late for each in rounds] == [(), (), (LateGradient("slow", "stale"),)]
    assert [each.num_counted for each in rounds] == [1, 1, 1]
    assert [each.ended for each in rounds] == [102.0, 103.0, 104.0]


def test_points_have_what_is_known() -> None:
    known = Gradient("a\n", 0.0, 0.5, 2.0, 1, 3.0, 0.9, 12, metrics={"loss": 0.25})
    described = Round(
        4, 100.0, 2.0, 3.0, 0.1, 2, 3, "grace", 0.01, {"loss": 0.5}, (known, Gradient("")), missing=("b",)
    )
    assert points_of_round(described) == {
        "round/gradients": 2,
        "round/required": 3,
        "round/late": 0,
        "round/missing": 1,
        "round/seconds": 2.0,
        "round/step_seconds": 3.0,
        "round/apply_seconds": 0.1,
        "round/learning_rate": 0.01,
        "metrics/loss": 0.5,
        r"arrival_seconds/a\n": 0.0,
        r"waited_seconds/a\n": 0.5,
        r"weight/a\n": 2.0,
        r"staleness/a\n": 1,
        r"norm/a\n": 3.0,
        r"cosine/a\n": 0.9,
        r"worker_loss/a\n": 0.25,
    }
    assert points_of_round(Round(1, 100.0)) == {"round/gradients": 0, "round/late": 0}
    assert points_of_evaluation(Evaluation(3, {"loss": 0.5})) == {"evaluation/loss": 0.5}


ROUNDS = tuple(Round(step, 100.0 + step) for step in (5, 6, 7))
SET_BACK = (*ROUNDS, Round(4, 108.0), Round(5, 109.0))


@pytest.mark.parametrize(
    ("rounds", "last", "steps", "num_lost"),
    [
        (ROUNDS, None, [5, 6, 7], 0),
        (ROUNDS, Mark(5, 105.0), [6, 7], 0),
        (ROUNDS, Mark(6, 107.5), [7], 0),
        (ROUNDS, Mark(7, 107.0), [], 0),
        (ROUNDS, Mark(2, 102.0), [5, 6, 7], 2),
        (ROUNDS, Mark(7, 10.0), [5, 6, 7], 0),
        (SET_BACK, Mark(7, 107.0), [4, 5], 0),
        (SET_BACK, Mark(5, 105.0), [6, 7, 4, 5], 0),
        (SET_BACK, Mark(5, 109.0), [], 0),
        ((), Mark(5, 105.0), [], 0),
    ],
    ids=["all", "after one", "other clock", "none", "gap", "long ago", "set back", "twice", "again", "empty"],
)
def test_the_rounds_after_one(rounds: tuple[Round, ...], last: Mark | None, steps: list[int], num_lost: int) -> None:
    found, lost = Look(SUBJECT, rounds).after(last)
    assert ([each.step for each in found], lost) == (steps, num_lost)


# Each round once


def test_an_export_goes_on_after_the_last_round(
    command_line: CommandLine, client: gradserve.Client, tmp_path: Path
) -> None:
    found = made(client, "resumed")
    file = tmp_path / "rounds.jsonl"
    command = ("export", "parameters", "resumed", "--jsonl", str(file))
    push(found, 0, 2)
    found.report({"loss": 1.0}, 0)
    assert command_line.run(*command).stdout == f"{file}: 2 rounds, 1 evaluations\n"
    assert command_line.run(*command).stdout == f"{file}: 0 rounds, 0 evaluations\n"
    push(found, 2, 2)
    found.report({"loss": 0.5}, 3)
    assert command_line.run(*command).stdout == f"{file}: 2 rounds, 1 evaluations\n"
    assert steps_of(file) == [1, 2, 3, 4]
    assert steps_of(file, "evaluation") == [0, 3]


def test_a_line_that_was_cut_is_written_again(
    command_line: CommandLine, client: gradserve.Client, tmp_path: Path
) -> None:
    push(made(client, "cut"), 0, 2)
    file = tmp_path / "rounds.jsonl"
    command = ("export", "parameters", "cut", "--jsonl", str(file))
    command_line.run(*command)
    whole = file.read_bytes()
    file.write_bytes(whole[:-40])
    assert command_line.run(*command).exit_code == 0
    assert file.read_bytes() == whole
    assert steps_of(file) == [1, 2]


def test_rounds_that_are_no_longer_kept_are_counted(
    command_line: CommandLine, client: gradserve.Client, tmp_path: Path
) -> None:
    found = made(client, "gap", keep_rounds=2)
    file = tmp_path / "rounds.jsonl"
    command = ("export", "parameters", "gap", "--jsonl", str(file))
    push(found, 0, 4)
    assert command_line.run(*command).stderr == f"{file}: begins with step 3: no earlier rounds are kept\n"
    push(found, 4, 5)
    assert command_line.run(*command).stderr == f"{file}: 3 rounds before step 8 are lost: no longer kept\n"
    assert command_line.run(*command).stderr == ""
    assert steps_of(file) == [3, 4, 8, 9]


def test_a_file_of_another_incarnation_is_refused(
    command_line: CommandLine, client: gradserve.Client, tmp_path: Path
) -> None:
    file = tmp_path / "rounds.jsonl"
    command = ("export", "parameters", "reborn", "--jsonl", str(file))
    found = made(client, "reborn")
    push(found, 0)
    command_line.run(*command)
    before = file.read_bytes()
    found.delete()
    push(made(client, "reborn"), 0, 2)
    done = command_line.run(*command)
    assert done.exit_code == 1
    assert f"{file} is an export of parameters default/reborn, incarnation " in done.stderr
    assert file.read_bytes() == before


@pytest.mark.parametrize("line", ["no JSON", "{}", '{"record": "round", "step": 1}', "[1]"])
def test_a_file_of_something_else_is_refused(
    command_line: CommandLine, client: gradserve.Client, tmp_path: Path, line: str
) -> None:
    push(made(client, "elsewhere"), 0)
    file = tmp_path / "rounds.jsonl"
    file.write_text(f"{line}\n")
    done = command_line.run("export", "parameters", "elsewhere", "--jsonl", str(file))
    assert (done.exit_code, done.stderr) == (1, f"Error: {file}: line 1 is not of an export\n")
    assert file.read_text() == f"{line}\n"


def test_two_exports_do_not_write_to_one_file(
    command_line: CommandLine, client: gradserve.Client, tmp_path: Path
) -> None:
    push(made(client, "shared"), 0)
    file = tmp_path / "rounds.jsonl"
    with file.open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        done = command_line.run("export", "parameters", "shared", "--jsonl", str(file))
    assert (done.exit_code, done.stderr) == (1, f"Error: {file}: another export writes there\n")


# TensorBoard


def events_of(folder: Path) -> list[Any]:
    """The events with values of all files in a folder, in the order of the files."""
    from tensorboardX.proto.event_pb2 import Event

    found = []
    for path in sorted(folder.rglob("events.out.tfevents.*")):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack_from("<Q", data)
            found.append(Event.FromString(data[12 : 12 + length]))
            data = data[16 + length :]
    return [each for each in found if each.summary.value]


def values_of(event: Any) -> dict[str, float]:
    return {each.tag: each.simple_value for each in event.summary.value}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    pytest.importorskip("tensorboardX", reason="tensorboardX is not installed: make install-frameworks")
    return tmp_path / "runs"


def test_tensorboard_gets_an_event_for_each_round(
    command_line: CommandLine, client: gradserve.Client, folder: Path
) -> None:
    found = made(client, "board/net")
    push(found, 0, 2)
    found.report({"loss": 0.125}, 1)
    command = ("export", "parameters", "board/net", "--tensorboard", str(folder))
    assert command_line.run(*command).stdout == f"{folder}: 2 rounds, 1 evaluations\n"
    (run,) = folder.iterdir()
    assert run.name.startswith("board_net-")
    first, second, evaluation = events_of(folder)
    assert (first.step, second.step, evaluation.step) == (1, 2, 1)
    assert first.wall_time == found.rounds()[0].end_time
    assert values_of(second)["metrics/loss"] == values_of(second)["worker_loss/a"] == 0.5
    assert values_of(second)["round/learning_rate"] == 0.5
    assert values_of(evaluation) == {"evaluation/loss": 0.125}
    push(found, 2, 2)
    assert command_line.run(*command).stdout == f"{folder}: 2 rounds, 0 evaluations\n"
    assert command_line.run(*command).stdout == f"{folder}: 0 rounds, 0 evaluations\n"
    assert [each.step for each in events_of(folder) if "round/late" in values_of(each)] == [1, 2, 3, 4]
    assert len(list(run.iterdir())) == 2, "an export without anything new makes no file"


def test_an_event_that_was_cut_is_written_again(
    command_line: CommandLine, client: gradserve.Client, folder: Path
) -> None:
    push(made(client, "torn"), 0, 3)
    command = ("export", "parameters", "torn", "--tensorboard", str(folder))
    command_line.run(*command)
    (file,) = folder.rglob("events.out.tfevents.*")
    file.write_bytes(file.read_bytes()[:-20])
    assert command_line.run(*command).stdout == f"{folder}: 1 rounds, 0 evaluations\n"


def test_another_incarnation_is_another_run(command_line: CommandLine, client: gradserve.Client, folder: Path) -> None:
    command = ("export", "parameters", "twice", "--tensorboard", str(folder))
    for _ in range(2):
        found = made(client, "twice")
        push(found, 0)
        assert command_line.run(*command).exit_code == 0
        found.delete()
    assert len(list(folder.iterdir())) == 2


# Weights & Biases, of which only what the command calls stands here


@dataclass
class WandBRun:
    project: str
    name: str
    config: Mapping[str, str]
    summary: dict[str, float] = field(default_factory=dict)
    rows: list[Mapping[str, float]] = field(default_factory=list)
    metrics: set[tuple[str, str | None]] = field(default_factory=set)
    num_finished: int = 0

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.metrics.add((name, step_metric))

    def log(self, data: Mapping[str, float]) -> None:
        self.rows.append(data)
        self.summary.update(data)

    def finish(self) -> None:
        self.num_finished += 1


class WandBError(Exception):
    pass


class WandB(ModuleType):
    """The library, and the runs that its servers keep by their ids."""

    Error = WandBError

    def __init__(self) -> None:
        super().__init__("wandb")
        self.runs: dict[str, WandBRun] = {}

    def init(
        self,
        *,
        project: str,
        id: str,  # noqa: A002
        name: str,
        resume: str,
        config: Mapping[str, str],
    ) -> WandBRun:
        assert resume == "allow"
        if project == "forbidden":
            raise WandBError("permission denied")
        return self.runs.setdefault(id, WandBRun(project, name, config))


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> WandB:
    module = WandB()
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_wandb_gets_a_row_for_each_round(command_line: CommandLine, client: gradserve.Client, wandb: WandB) -> None:
    found = made(client, "biased")
    push(found, 0, 2)
    found.report({"loss": 0.125}, 1)
    command = ("export", "parameters", "biased", "--wandb", "proj")
    assert command_line.run(*command).stdout == "proj: 2 rounds, 1 evaluations\n"
    (run,) = wandb.runs.values()
    assert (run.project, run.name, run.config["kind"], run.num_finished) == ("proj", "biased", "parameters", 1)
    assert ("*", "step") in run.metrics
    assert [each["step"] for each in run.rows] == [1, 2, 1]
    assert run.rows[1]["metrics/loss"] == 0.5
    assert run.rows[2]["evaluation/loss"] == 0.125
    push(found, 2)
    assert command_line.run(*command).stdout == "proj: 1 rounds, 0 evaluations\n"
    assert [each["step"] for each in run.rows if "round/late" in each] == [1, 2, 3]


def test_what_wandb_refuses_is_said(command_line: CommandLine, client: gradserve.Client, wandb: WandB) -> None:
    push(made(client, "unwelcome"), 0)
    done = command_line.run("export", "parameters", "unwelcome", "--wandb", "forbidden")
    assert (done.exit_code, done.stderr) == (1, "Error: --wandb forbidden: permission denied\n")
    assert not wandb.runs


def test_several_targets_get_the_same(
    command_line: CommandLine, client: gradserve.Client, wandb: WandB, tmp_path: Path
) -> None:
    push(made(client, "both"), 0, 2)
    file = tmp_path / "rounds.jsonl"
    command = ("export", "parameters", "both", "--jsonl", str(file))
    command_line.run(*command)
    done = command_line.run(*command, "--wandb", "proj")
    assert done.stdout == f"proj: 2 rounds, 0 evaluations\n{file}: 0 rounds, 0 evaluations\n"


# What is refused


@pytest.mark.parametrize(("option", "library"), [("tensorboard", "tensorboardX"), ("wandb", "wandb")])
def test_a_missing_library_is_named_with_its_cure(
    command_line: CommandLine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, option: str, library: str
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    done = command_line.run("export", "parameters", "nobody", f"--{option}", str(tmp_path / "runs"))
    assert done.exit_code == 1
    assert f"--{option} needs {library}; install it with: pip install " in done.stderr
    assert f"[{option}]" in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "exit_code", "message"),
    [
        (("parameters", "net"), 2, "expected --tensorboard DIR, --wandb PROJECT or --jsonl FILE"),
        (("layers", "net", "--jsonl", "x"), 2, "expected accumulators or parameters, got 'layers'"),
        (("parameters", "net", "--jsonl", "x", "--interval", "3"), 2, "--interval is for --follow"),
        (("parameters", "nobody", "--jsonl", "x"), 1, "no parameters default/nobody on "),
        (("accumulator", "nobody", "--jsonl", "x"), 1, "no accumulator default/nobody on "),
        (("parameters", "nobody", "localhost:1", "--jsonl", "x"), 1, "localhost:1: "),
        (("parameters", "nobody", "a b", "--jsonl", "x"), 2, "address"),
    ],
    ids=["no target", "layers", "interval", "no parameters", "no accumulator", "no server", "no address"],
)
def test_what_cannot_be_exported_says_why(
    command_line: CommandLine, arguments: tuple[str, ...], exit_code: int, message: str
) -> None:
    done = command_line.run("export", *arguments)
    assert (done.exit_code, message in done.stderr) == (exit_code, True), done.output
    assert not Path("x").exists()


def test_private_parameters_are_refused(command_line: CommandLine, client: gradserve.Client, tmp_path: Path) -> None:
    private = client.parameters({"w": np.zeros(3, np.float32)}, name="own")
    done = command_line.run("export", "parameters", private.name, "--jsonl", str(tmp_path / "never"))
    assert (done.exit_code, "are private to a client" in done.stderr) == (1, True)
    private.delete()


def test_a_folder_that_cannot_be_written_is_named(
    command_line: CommandLine, client: gradserve.Client, tmp_path: Path
) -> None:
    push(made(client, "unwritten"), 0)
    done = command_line.run("export", "parameters", "unwritten", "--jsonl", str(tmp_path / "nowhere" / "file"))
    assert (done.exit_code, "No such file or directory" in done.stderr) == (1, True)


# Following


@contextmanager
def following(address: str, name: str, file: Path, kind: str = "parameters") -> Iterator[subprocess.Popen[str]]:
    """Runs an export that follows, in a process of its own."""
    command = [sys.executable, "-m", "gradserve_server", "export", kind, name, address, "--jsonl", str(file)]
    command += ["--follow", "--interval", "0.2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Returns the exit code, the output and the errors of a process that ends."""
    output, errors = process.communicate(timeout=PATIENCE_SECONDS)
    return process.returncode, output, errors


def test_following_ends_when_what_is_followed_is_deleted(
    command_line: CommandLine, client: gradserve.Client, tmp_path: Path
) -> None:
    file = tmp_path / "rounds.jsonl"
    found = made(client, "followed")
    push(found, 0)
    with following(command_line.address, "followed", file) as process:
        eventually(lambda: whole_lines(file) == 1)
        push(found, 1, 2)
        eventually(lambda: whole_lines(file) == 3)
        found.report({"loss": 1.0}, 3)
        eventually(lambda: whole_lines(file) == 4)
        found.delete()
        code, output, errors = ended(process)
    assert (code, output) == (0, f"{file}: 3 rounds, 1 evaluations\n")
    assert errors == f"parameters default/followed on {command_line.address} was deleted\n"
    assert steps_of(file) == [1, 2, 3]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_following_with_all_rounds(
    command_line: CommandLine, client: gradserve.Client, tmp_path: Path, number: signal.Signals
) -> None:
    name = f"signalled-{number.name}"
    file = tmp_path / "rounds.jsonl"
    net = client.conditional_accumulator("float32", (), shared_name=name)
    net.apply_grad(np.float32(1), local_step=0, worker_id="a")
    net.take_grad(1)
    with following(command_line.address, name, file, "accumulator") as process:
        eventually(lambda: whole_lines(file) == 1)
        net.apply_grad(np.float32(1), local_step=1, worker_id="a")
        net.take_grad(1)
        process.send_signal(number)
        assert ended(process) == (0, f"{file}: 2 rounds, 0 evaluations\n", "")
    assert steps_of(file) == [1, 2]


def test_following_waits_for_a_server_that_starts_again(tmp_path: Path) -> None:
    file = tmp_path / "rounds.jsonl"
    with RestartingServer(tmp_path / "state") as server, gradserve.connect(server.address) as client:
        found = made(client, "lasting", durability="round")
        push(found, 0, 2)
        with following(server.address, "lasting", file) as process:
            eventually(lambda: whole_lines(file) == 2)
            server.stop()
            assert process.stderr is not None
            assert process.stderr.readline().startswith(f"no answer, will ask again: {server.address}: ")
            server.start()
            push(found, 2, 2)
            eventually(lambda: whole_lines(file) == 4)
            process.send_signal(signal.SIGTERM)
            code, output, _ = ended(process)
    assert (code, output) == (0, f"{file}: 4 rounds, 0 evaluations\n")
    assert steps_of(file) == [1, 2, 3, 4]


# Clusters


@pytest.fixture(scope="module")
def two_servers() -> Iterator[list[str]]:
    with running_cluster(2) as servers:
        yield addresses_of(servers)


@pytest.mark.parametrize("home", [0, 1])
@pytest.mark.parametrize("sharded", [False, True])
def test_the_home_of_parameters_is_asked(two_servers: list[str], tmp_path: Path, home: int, sharded: bool) -> None:
    name = name_at(home, 2, f"exported-{sharded}-")
    with gradserve.connect(two_servers) as client:
        found = made(client, name, sharded=sharded)
        for step in range(2):
            found.push_pull(UPDATE, step, worker_id="a", metrics={"loss": 0.5})
    file = tmp_path / "rounds.jsonl"
    done = CommandLine(",".join(two_servers)).run("export", "parameters", name, "--jsonl", str(file))
    assert done.exit_code == 0, done.output
    assert [(each["step"], each["num_counted"], each["metrics"]) for each in lines_of(file)] == [
        (1, 1, {"loss": 0.5}),
        (2, 1, {"loss": 0.5}),
    ]


@pytest.mark.parametrize("sharded", [False, True])
def test_the_home_of_an_accumulator_is_asked(two_servers: list[str], tmp_path: Path, sharded: bool) -> None:
    with gradserve.connect(two_servers) as client:
        name = name_at(1, 2, f"exported-net-{sharded}-")
        net = client.gradient_accumulator(UPDATE, shared_name=name, sharded=sharded)
        net.push_pull(UPDATE, 1, 0, worker_id="a")
        file = tmp_path / "rounds.jsonl"
        line = CommandLine(",".join(two_servers))
        assert line.run("export", "accumulator", net.name, "--jsonl", str(file)).exit_code == 0
    assert steps_of(file) == [1]
