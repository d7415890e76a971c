"""The alert rules and the dashboard, with a real Prometheus that scrapes a real server."""

import json
import math
import re
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
import yaml
from pydantic import ByteSize

import gradserve
from deploy.grafana.dashboard import dashboard
from gradserve_server.config import LimitsConfig, ServerConfig, StateConfig
from gradserve_testing import LocalServer
from tests.monitoring.prometheus import Prometheus, needs_prometheus, scraping
from tests.observe.http_client import get, url_of
from tests.servers.polling import eventually
from tests.servers.runtime import NOT_WARMED_UP

RULES = Path("deploy/prometheus/alerts.yml")
_FIRING = {
    "GradserveRoundStalled",
    "GradserveMetricNotFinite",
    "GradserveSlowWorker",
    "GradserveStaleGradients",
    "GradserveMemoryNearLimit",
    "GradserveResourcesNearLimit",
    "GradserveRefusals",
}
"""The alerts that the traffic of these tests causes; promtool tests the others."""


def impatient(rules: str) -> str:
    """Returns the rules for a test: about some seconds instead of minutes."""
    assert "open_round_age_seconds > 120\n" in rules
    shorter = re.sub(r"for: \w+", "for: 0s", rules).replace("[5m]", "[5s]")
    return shorter.replace("open_round_age_seconds > 120\n", "open_round_age_seconds > 1\n")


def make_traffic(address: str, stop: threading.Event) -> None:
    """Lets everything happen that the dashboard shows, until it is told to stop."""
    gradient = np.ones(1000, np.float32)
    with gradserve.connect(address) as client:
        held = client.put(np.ones(3 << 18, np.float32))
        stalled = client.conditional_accumulator("float32", (1000,), shared_name="monitoring/stalled")
        stalled.apply_grad(gradient, worker_id="the only one")
        acc = client.conditional_accumulator("float32", (1000,), shared_name="monitoring/net")
        held_there = client.parameters(
            {"w": np.zeros(8, np.float32)}, shared_name="monitoring/parameters", num_required=2
        )
        step = 0
        while not stop.is_set():
            for worker, metrics in {"quick": {"loss": 0.5}, "slow": {"norm": math.inf}}.items():
                held_there.push({"w": np.ones(8, np.float32)}, step, worker_id=worker, metrics=metrics)
            held_there.report({"loss": 0.25}, step)
            held_there.push({"w": np.ones(8, np.float32)}, step, worker_id="slow")  # stale
            acc.apply_grad(gradient, local_step=step, worker_id="quick")
            stop.wait(0.3)
            acc.apply_grad(gradient, local_step=step, worker_id="slow")
            acc.take_grad(2)
            step += 1
            acc.apply_grad(gradient, local_step=step - 1, worker_id="slow")
            with pytest.raises(gradserve.DeadlineExceededError):
                acc.take_grad(9, timeout=0.01)
            for _ in range(3):
                with pytest.raises(gradserve.ResourceExhaustedError):
                    client.conditional_accumulator("float32", (), shared_name="monitoring/one too many")
        client.delete(held)


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    limits = LimitsConfig(max_bytes=ByteSize(3_300_000), max_accumulators=3)
    config = ServerConfig(limits=limits, runtime=NOT_WARMED_UP)
    stop = threading.Event()
    with LocalServer(config) as local:
        traffic = threading.Thread(target=make_traffic, args=(local.address, stop))
        traffic.start()
        try:
            target = urlsplit(url_of(local)).netloc
            with scraping(tmp_path_factory.mktemp("prometheus"), target, impatient(RULES.read_text())) as running:
                yield running
        finally:
            stop.set()
            traffic.join()


@needs_prometheus
@pytest.mark.parametrize(
    "arguments",
    [("check", "config", "prometheus.yml"), ("check", "rules", "alerts.yml"), ("test", "rules", "alerts_test.yml")],
)
def test_the_rules_are_what_prometheus_takes_and_fire_when_they_should(arguments: tuple[str, ...]) -> None:
    done = subprocess.run(["promtool", *arguments], cwd=RULES.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_prometheus
@pytest.mark.timing  # an alert about a server that does not answer in 0.5 s would fire, too
def test_alerts_fire_about_a_real_server(prometheus: Prometheus) -> None:
    def names(data: dict[str, list[dict[str, dict[str, str]]]]) -> set[str]:
        return {each["labels"]["alertname"] for each in data["alerts"]}

    data = prometheus.until("alerts", lambda data: names(data) >= _FIRING)
    assert names(data) == _FIRING
    texts = {each["labels"]["alertname"]: each["annotations"]["summary"] for each in data["alerts"]}
    assert texts["GradserveRoundStalled"].startswith("the round of default/monitoring/stalled has waited for ")
    assert texts["GradserveSlowWorker"].startswith("others wait for slow ")
    assert texts["GradserveMemoryNearLimit"].startswith("all tensors of 127.0.0.1:")


@needs_prometheus
def test_every_query_of_the_dashboard_finds_something(prometheus: Prometheus) -> None:
    """Rates need several scrapes with traffic in between, which nobody promises before a moment."""

    def empty() -> list[tuple[str, str]]:
        found = []
        for panel in dashboard()["panels"]:
            for target in panel.get("targets", ()):
                query = target["expr"].replace("$__rate_interval", "1m")
                query = query.replace("$instance", ".*").replace("$metric", ".*")
                labels = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
                series = prometheus.query(query)
                if not any(labels <= set(each["metric"]) and each["value"][1] != "NaN" for each in series):
                    found.append((panel["title"], query))
        return found

    eventually(empty, lambda queries: not queries)


_METRIC = re.compile(r"\b(?:gradserve|grpc_server|process)_[a-z0-9_]+")


def exposed(url: str) -> set[str]:
    """Returns the names of the series of a server, whether there are any yet or not."""
    names = set()
    for name, kind in re.findall(r"# TYPE (\S+) (\w+)", get(url, "/metrics").text):
        names |= {f"{name}_{part}" for part in ("bucket", "count", "sum")} if kind == "histogram" else {name}
    return names


def test_alerts_and_dashboard_ask_for_metrics_that_a_server_has(tmp_path: Path) -> None:
    state = StateConfig(state_dir=str(tmp_path / "state"), backup_dir=str(tmp_path / "backups"))
    queries = [rule["expr"] for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    num_rules = len(queries)
    queries += [target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", ())]
    wanted = {name for query in queries for name in _METRIC.findall(re.sub(r'"[^"]*"', "", query))}
    with LocalServer(ServerConfig(state=state, runtime=NOT_WARMED_UP)) as local:
        assert wanted - exposed(url_of(local)) == set()
    assert num_rules > 10
    assert len(wanted) > 20


def test_the_dashboard_is_the_one_that_its_program_makes() -> None:
    assert json.loads(Path("deploy/grafana/gradserve.json").read_text()) == dashboard()


def test_every_alert_is_explained_and_tested() -> None:
    alerts = re.findall(r"- alert: (\w+)", RULES.read_text())
    page = Path("docs/alerts.md").read_text()
    tests = (RULES.parent / "alerts_test.yml").read_text()
    for alert in alerts:
        assert f"| `{alert}` |" in page
        assert f"alertname: {alert}\n" in tests
