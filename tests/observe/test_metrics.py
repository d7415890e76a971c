"""What the metrics say."""

import math
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from pydantic import ByteSize

import gradserve
from gradserve_server.config import LimitsConfig, ServerConfig, StateConfig
from gradserve_testing import LocalServer
from tests.observe.http_client import get, url_of
from tests.servers.runtime import NOT_WARMED_UP
from tests.trees.servers import aggregator

GRADIENT = np.ones(1000, np.float32)


@pytest.fixture(scope="module")
def local() -> Iterator[LocalServer]:
    with LocalServer(ServerConfig(runtime=NOT_WARMED_UP)) as server:
        yield server


class Metrics:
    """The metrics of a server at one moment."""

    def __init__(self, local: LocalServer) -> None:
        self.families = list(text_string_to_metric_families(get(url_of(local), "/metrics").text))
        self._values = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in self.families
            for sample in family.samples
        }

    def value(self, name: str, **labels: str) -> float:
        return self._values.get((name, frozenset(labels.items())), 0.0)

    def grown(self, before: "Metrics", name: str, **labels: str) -> float:
        return self.value(name, **labels) - before.value(name, **labels)

    def of_parameters(self, name: str, **labels: str) -> float:
        named = {"container": "default", "parameters": "metrics/twins"}
        return self.value(f"gradserve_parameters_{name}", **named, **labels)

    def of_call(self, name: str, method: str, **labels: str) -> float:
        service = "gradserve.v1.AccumulatorService"
        return self.value(name, grpc_type="unary", grpc_service=service, grpc_method=method, **labels)


def test_a_wait_is_no_work(local: LocalServer) -> None:
    with gradserve.connect(local.address) as client:
        acc = client.conditional_accumulator("float32", (1000,), shared_name="metrics/waits")
        begun = time.monotonic()
        with pytest.raises(gradserve.DeadlineExceededError):
            acc.take_grad(1, timeout=0.3)
    found = Metrics(local)
    passed = time.monotonic() - begun
    assert found.of_call("grpc_server_handled_total", "TakeGradient", grpc_code="DEADLINE_EXCEEDED") == 1
    assert found.of_call("grpc_server_handling_seconds_count", "TakeGradient") == 1
    assert found.of_call("gradserve_call_waiting_seconds_count", "TakeGradient") == 1
    waited = found.of_call("gradserve_call_waiting_seconds_sum", "TakeGradient")
    worked = found.of_call("grpc_server_handling_seconds_sum", "TakeGradient")
    assert waited > 0.29
    assert waited + worked <= passed, "no time counts twice"


@pytest.mark.parametrize("way", ["grpc", "bulk", "shared_memory"])
def test_each_way_counts_its_bytes(local: LocalServer, way: Any) -> None:
    before = Metrics(local)
    with gradserve.connect(local.address, transport=way) as client:
        acc = client.conditional_accumulator("float32", (1000,), shared_name=f"metrics/ways/{way}")
        acc.apply_grad(GRADIENT)
        acc.take_grad(1)
    after = Metrics(local)
    for direction in ("received", "sent"):
        labels = {"way": way, "direction": direction}
        moved = after.value("gradserve_transferred_bytes_total", **labels) - before.value(
            "gradserve_transferred_bytes_total", **labels
        )
        assert GRADIENT.nbytes <= moved < GRADIENT.nbytes + 2000


def test_gradients_count_by_outcome(local: LocalServer) -> None:
    before = Metrics(local)
    with gradserve.connect(local.address) as client:
        acc = client.conditional_accumulator("float32", (1000,), shared_name="metrics/outcomes")
        acc.apply_grad(GRADIENT, worker_id="a")
        acc.take_grad(1)
        acc.apply_grad(GRADIENT, local_step=0, worker_id="b")
        with pytest.raises(gradserve.InvalidArgumentError):
            acc.apply_grad(np.ones(3, np.float32), local_step=1)
    after = Metrics(local)
    assert {
        outcome: after.value("gradserve_gradients_total", outcome=outcome)
        - before.value("gradserve_gradients_total", outcome=outcome)
        for outcome in ("accepted", "stale", "duplicate", "refused")
    } == {"accepted": 1, "stale": 1, "duplicate": 0, "refused": 1}
    assert after.value("gradserve_gradient_bytes_total", outcome="stale") == GRADIENT.nbytes
    assert after.value("gradserve_accumulator_rounds_total", container="default", accumulator="metrics/outcomes") == 1


def test_workers_with_other_parameters_are_counted(local: LocalServer) -> None:
    gradient = {"w": np.ones(3, np.float32)}
    with gradserve.connect(local.address) as client:
        acc = client.gradient_accumulator(gradient, "metrics/different")
        for step, digests in enumerate(({"a": b"1", "b": b"2", "c": b"1"}, {"a": b"3", "b": b"3"})):
            for worker_id, digest in digests.items():
                acc.apply_grad(gradient, step, worker_id=worker_id, parameters_digest=digest)
            acc.take_grad(len(digests))
            of_it = {"container": "default", "accumulator": "metrics/different"}
            assert Metrics(local).value("gradserve_accumulator_different_workers", **of_it) == (1, 0)[step]
            assert Metrics(local).value("gradserve_accumulator_compared_workers", **of_it) == len(digests)


def test_refused_nan_is_counted_apart(local: LocalServer) -> None:
    before = Metrics(local)
    nan = {"w": np.array([1, np.nan, 3], np.float32)}
    with gradserve.connect(local.address) as client:
        acc = client.gradient_accumulator(nan, "metrics/nan", refuse_non_finite=True)
        with pytest.raises(gradserve.InvalidArgumentError, match=r"expected finite values.*\[GS_NOT_FINITE\]"):
            acc.apply_grad(nan)
        with pytest.raises(gradserve.InvalidArgumentError):
            acc.apply_grad({"w": np.ones(4, np.float32)})
    after = Metrics(local)
    for name, number in (
        ("gradserve_not_finite_gradients_total", 1),
        ("gradserve_parameters_not_finite_updates_total", 0),
    ):
        assert after.value(name) - before.value(name) == number


def test_the_disk_of_the_state_is_measured(local: LocalServer, tmp_path: Path) -> None:
    state = StateConfig(state_dir=str(tmp_path / "state"))
    with LocalServer(ServerConfig(state=state, runtime=NOT_WARMED_UP)) as durable:
        metrics = Metrics(durable)
        total = metrics.value("gradserve_state_disk_bytes")
        assert total == shutil.disk_usage(tmp_path).total
        assert 0 < metrics.value("gradserve_state_disk_free_bytes") <= total
    assert "gradserve_state_disk" not in get(url_of(local), "/metrics").text


def test_parameters_have_metrics_of_their_own_beside_an_accumulator_of_the_same_name(
    local: LocalServer, tmp_path: Path
) -> None:
    update = {"w": np.ones(3, np.float32)}
    before = Metrics(local)
    with gradserve.connect(local.address) as client:
        found = client.parameters(
            {"w": np.zeros(3, np.float32)}, shared_name="metrics/twins", num_required=2, max_staleness=1,
            optimizer=gradserve.optim.SGD(0.5),
        )  # fmt: skip
        client.conditional_accumulator("float32", (3,), shared_name="metrics/twins").apply_grad(np.ones(3, np.float32))
        for local_step, worker, weight in ((0, "a", 2.0), (0, "b", 2.0), (0, "c", 1.0), (0, "c", 1.0), (1, "a", 1.0)):
            found.push(update, local_step, worker_id=worker, weight=weight, metrics={"loss": weight})
        found.push(update, 0, worker_id="b", weight=8.0)
        found.report({"loss": math.inf, "accuracy": 0.75}, 1)
        found.push(update, 2, worker_id="b", weight=4.0)
        after = Metrics(local)
        assert [after.of_parameters(name) for name in ("step", "learning_rate", "open_round_updates")] == [2, 0.5, 1]
        assert [after.of_parameters(name) for name in ("required_updates", "waiting_calls")] == [2, 0]
        assert after.of_parameters("rounds_total", reason="required") == 2
        assert after.of_parameters("bytes") == found.info().num_bytes > 0
        assert after.of_parameters("participation_ratio") == pytest.approx(2 / 3)
        weights = [after.of_parameters(f"{name}_weight_total") for name in ("accepted", "applied", "dropped")]
        assert (*weights, after.of_parameters("pending_weight")) == (10, 6, 0, 4)
        assert after.of_parameters("refused_weight_total", reason="stale") == 8
        assert after.of_parameters("refused_weight_total", reason="already counted") == 1
        assert after.of_parameters("open_round_age_seconds") > 0
        assert after.of_parameters("round_metric", metric="loss") == found.rounds()[-1].metrics["loss"] == 1
        evaluated = [after.of_parameters("evaluation_metric", metric=each) for each in ("loss", "accuracy")]
        assert evaluated == [math.inf, 0.75]
        outcomes = ("accepted", "stale", "duplicate", "refused")
        assert [after.grown(before, "gradserve_parameters_updates_total", outcome=each) for each in outcomes] == [
            5, 1, 1, 0,
        ]  # fmt: skip
        assert after.grown(before, "gradserve_gradients_total", outcome="accepted") == 1
        assert after.value("gradserve_accumulator_rounds_total", container="default", accumulator="metrics/twins") == 0
        assert after.value("gradserve_resources", kind="parameters") == 1

        found.save(tmp_path / "saved.safetensors")
        found.load(tmp_path / "saved.safetensors")
        loaded = Metrics(local)
        weights = [loaded.of_parameters(f"{name}_weight_total") for name in ("accepted", "applied", "dropped")]
        assert (*weights, loaded.of_parameters("pending_weight")) == (10, 6, 4, 0)
        assert loaded.of_parameters("open_round_age_seconds") == 0
        found.delete()
    gone = Metrics(local)
    assert gone.of_parameters("step") == 0
    assert gone.grown(before, "gradserve_parameters_updates_total", outcome="accepted") == 5


@pytest.mark.parametrize("way", ["bulk", "shared_memory"])
def test_a_payload_that_cannot_be_received_is_a_failed_call(way: Any) -> None:
    config = ServerConfig(limits=LimitsConfig(max_bytes=ByteSize(10_000_000)), runtime=NOT_WARMED_UP)
    with LocalServer(config) as small, gradserve.connect(small.address, transport=way) as client:
        with pytest.raises(gradserve.ResourceExhaustedError):
            client.put(np.ones(5_000_000, np.float32))
        found = Metrics(small)
    labels = {"grpc_type": "unary", "grpc_service": "gradserve.v1.TensorService", "grpc_method": "StoreTensors"}
    assert found.value("grpc_server_handled_total", grpc_code="RESOURCE_EXHAUSTED", **labels) >= 1
    assert found.value("grpc_server_started_total", **labels) == found.value(
        "grpc_server_handled_total", grpc_code="RESOURCE_EXHAUSTED", **labels
    )


def test_memory_counts_for_its_purpose(local: LocalServer) -> None:
    with gradserve.connect(local.address) as client:
        handle = client.put(np.ones(1 << 18, np.float32))
        acc = client.conditional_accumulator("float32", (1 << 19,), shared_name="metrics/memory")
        acc.apply_grad(np.ones(1 << 19, np.float32))
        found = Metrics(local)
        assert found.value("gradserve_memory_bytes", purpose="stored tensors") == 1 << 20
        assert found.value("gradserve_memory_bytes", purpose="accumulators") >= 1 << 21
        assert found.value("gradserve_resources", kind="handles") == 1
        client.delete(handle)
        client.delete_accumulator("metrics/memory")
    after = Metrics(local)
    assert after.value("gradserve_memory_bytes", purpose="stored tensors") == 0
    assert after.value("gradserve_memory_bytes", purpose="all tensors") == sum(
        after.value("gradserve_memory_bytes", purpose=purpose)
        for purpose in ("stored tensors", "accumulators", "layers", "calls")
    )


def test_names_keep_to_the_conventions(local: LocalServer) -> None:
    for family in Metrics(local).families:
        assert family.documentation or family.name.startswith("process_")
        assert family.name.startswith(("gradserve", "grpc_server_", "process_", "python_")), family.name
        if family.type == "histogram" and "seconds" not in family.name:
            assert family.name.endswith("_steps")


def test_openmetrics_is_answered_where_it_is_asked_for(local: LocalServer) -> None:
    answer = get(url_of(local), "/metrics", Accept="application/openmetrics-text; version=1.0.0")
    assert answer.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    assert answer.text.endswith("# EOF\n")


def test_the_number_of_series_is_bounded(local: LocalServer) -> None:
    with gradserve.connect(local.address) as client:
        for number in range(150):
            acc = client.conditional_accumulator("float32", (1,), shared_name=f"metrics/series/{number}")
            acc.apply_grad([1.0], worker_id=f"worker {number}")
            acc.apply_grad([1.0], worker_id=f"other {number}")
            acc.take_grad(2)
            client.delete_accumulator(f"metrics/series/{number}")
        for number in range(120):
            found = client.parameters({"w": np.zeros(1, np.float32)}, shared_name=f"metrics/series/{number}")
            found.push({"w": np.ones(1, np.float32)}, 0)
        for number in range(150):
            acc = client.conditional_accumulator("float32", (1,), shared_name=f"metrics/more series/{number}")
            acc.apply_grad([1.0])
            acc.take_grad(1)
    for family in Metrics(local).families:
        if family.name in ("gradserve_accumulator_rounds", "gradserve_round_waited_for_worker_seconds"):
            assert 100 <= len(family.samples) <= 101
        if family.name in ("gradserve_parameters_rounds", "gradserve_parameters_step"):
            assert len(family.samples) == 100


def test_every_metric_is_documented(local: LocalServer, tmp_path: Path) -> None:
    page = Path("docs/metrics.md").read_text()
    documented = set(re.findall(r"^\| `(gradserve_\w+|grpc_\w+)`", page, re.MULTILINE))
    backed_up = StateConfig(state_dir=str(tmp_path / "state"), backup_dir=str(tmp_path / "backups"))
    with aggregator(local.address, 2, state=backed_up) as near:  # which has some that others have not
        exposed = {
            family.name + ("_total" if family.type == "counter" else "")
            for family in (*Metrics(local).families, *Metrics(near).families)
            if not family.name.startswith(("process_", "python_"))
        }
    assert exposed == documented
