"""A server's memory of accumulators and parameters that are gone."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradserve
from gradserve_protocol.server_status import PastRun
from gradserve_server.config import ServerConfig, StateConfig
from gradserve_server.resources.registry import ResourceKey
from gradserve_server.resources.runs import DELETED, LOST, STOPPED, Run, Runs
from gradserve_testing import LocalServer
from tests.servers.runtime import NOT_WARMED_UP

_SECOND = 1_000_000_000
_VALUES = {"w": np.ones(2, np.float32)}


class Clock:
    def __init__(self) -> None:
        self.now = 1000

    def __call__(self) -> int:
        return self.now * _SECOND


def key(name: str) -> ResourceKey:
    return ResourceKey("default", name)


def test_a_run_is_remembered_from_its_begin_to_its_end() -> None:
    clock = Clock()
    runs = Runs(clock)
    for kind in ("accumulator", "parameters"):
        runs.begin(kind, key("net"), "", f"{kind} 1")
    assert runs.past == []
    clock.now = 1060
    runs.end("accumulator", key("net"), 7, DELETED)
    clock.now = 1090
    runs.end("parameters", key("net"), 9, "its lease has ended", {"loss": 0.5})
    assert runs.past == [
        Run(
            "parameters", "default", "net", "", "parameters 1", 1000.0, 1090.0, 9, {"loss": 0.5}, "its lease has ended"
        ),
        Run("accumulator", "default", "net", "", "accumulator 1", 1000.0, 1060.0, 7, {}, DELETED),
    ]


def test_what_had_no_round_and_what_runs_make_for_themselves_is_forgotten() -> None:
    runs = Runs(Clock())
    for name, step in (("empty", 0), (f"line/{'0f' * 20}/answers", 3)):
        runs.begin("accumulator", key(name), "", "1")
        runs.end("accumulator", key(name), step, DELETED)
    assert runs.past == []


def test_the_oldest_of_too_many_are_forgotten() -> None:
    clock = Clock()
    runs = Runs(clock, most=2)
    for number in range(4):
        clock.now += 1
        runs.begin("accumulator", key("net"), "", str(number))
        runs.end("accumulator", key("net"), 1, DELETED)
    assert [run.incarnation for run in runs.past] == ["3", "2"]


def past_of(client: gradserve.Client, *, container: str = "", name_contains: str = "") -> tuple[PastRun, ...]:
    return client.server_status(max_past_runs=256, container=container, name_contains=name_contains).past_runs


def train(client: gradserve.Client, name: str, **options: Any) -> None:
    accumulator = client.gradient_accumulator(_VALUES, shared_name=name, **options)
    accumulator.push_pull(_VALUES, 1)


def test_runs_are_there_after_a_restart(tmp_path: Path) -> None:
    config = ServerConfig(state=StateConfig(state_dir=str(tmp_path / "state")), runtime=NOT_WARMED_UP)
    with LocalServer(config) as server, gradserve.connect(server.address) as client:
        train(client, "deleted")
        client.delete_accumulator("deleted")
        train(client, "not durable", durability="none")
        train(client, "goes on")
        llm = client.parameters(_VALUES, shared_name="llm", optimizer=gradserve.optim.SGD(0.5))
        llm.push_pull(_VALUES, 0, metrics={"loss": 0.25})
        (before,) = past_of(client)
        assert (before.kind, before.name, before.step, before.reason) == ("accumulator", "deleted", 1, DELETED)
        assert before.begun <= before.ended
    with LocalServer(config) as server, gradserve.connect(server.address) as client:
        found = {run.name: run for run in past_of(client)}
        assert found.keys() == {"deleted", "not durable"}
        assert found["deleted"] == before
        assert (found["not durable"].step, found["not durable"].reason) == (1, STOPPED)
        client.delete_parameters("llm")
        client.delete_accumulator("goes on")
        (llm_run,) = past_of(client, name_contains="LLM")
        assert (llm_run.kind, llm_run.step, llm_run.metrics) == ("parameters", 1, {"loss": 0.25})
        (other,) = past_of(client, name_contains="goes on")
        assert other.begun <= found["not durable"].ended  # it began in the earlier run of the server
        assert past_of(client, container="elsewhere") == ()
        assert client.server_status().past_runs == ()  # unless they are asked for
        assert [run.name for run in client.server_status(max_past_runs=1).past_runs] == ["goes on"]


def test_what_a_crash_has_lost_is_said(tmp_path: Path) -> None:
    config = ServerConfig(state=StateConfig(state_dir=str(tmp_path / "state")), runtime=NOT_WARMED_UP)
    with LocalServer(config) as server, gradserve.connect(server.address) as client:
        train(client, "lost", durability="none")
        copied = tmp_path / "copy"
        train(client, "goes on")  # whose round is on disk, and all before it
        shutil.copytree(tmp_path / "state", copied)
    config = ServerConfig(state=StateConfig(state_dir=str(copied)), runtime=NOT_WARMED_UP)
    with LocalServer(config) as server, gradserve.connect(server.address) as client:
        (run,) = past_of(client)
        assert (run.name, run.ended, run.step, run.reason) == ("lost", 0.0, 0, LOST)


@pytest.mark.parametrize("most", [-1, 257])
def test_a_number_that_cannot_be(client: gradserve.Client, most: int) -> None:
    with pytest.raises(gradserve.InvalidArgumentError, match="max_past_runs"):
        client.server_status(max_past_runs=most)


def test_the_last_rounds_of_a_durable_accumulator_are_there_after_a_restart(tmp_path: Path) -> None:
    config = ServerConfig(state=StateConfig(state_dir=str(tmp_path / "state")), runtime=NOT_WARMED_UP)
    with LocalServer(config) as server, gradserve.connect(server.address) as client:
        accumulator = client.gradient_accumulator(_VALUES, shared_name="net")
        for step in range(23):
            for worker_id in ("a", "b"):
                accumulator.apply_grad(_VALUES, step, worker_id=worker_id)
            accumulator.take_grad(2)
        (before,) = client.server_status().accumulators
    with LocalServer(config) as server, gradserve.connect(server.address) as client:
        (after,) = client.server_status().accumulators
        assert [each.step for each in after.rounds] == list(range(4, 24))
        assert after.rounds[-1].ended < 0.0  # before the start
        assert [[each.worker_id for each in one.arrivals] for one in after.rounds] == [["a", "b"]] * 20
        for one, other in zip(before.rounds, after.rounds, strict=True):
            second = other.arrivals[1].after
            assert second == pytest.approx(one.arrivals[1].after, abs=1e-4)
            # What is kept was written down before the disk had it, and so before the round had ended.
            assert second <= other.ended - other.began <= one.ended - one.began + 1e-4
        accumulator = client.gradient_accumulator(_VALUES, shared_name="net")
        accumulator.apply_grad(_VALUES, 23, worker_id="a")
        accumulator.take_grad(1)
        (after,) = client.server_status().accumulators
        assert [each.step for each in after.rounds] == list(range(5, 25))
        assert after.rounds[-1].missing == ("b",)
        assert after.rounds[-1].ended > 0.0
