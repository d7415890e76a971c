"""What Kubernetes is told: valid, up to date, and in harmony with the server's own settings and the image."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

import gradserve
from deploy.grafana.dashboard import dashboard
from gradserve_server.config import RuntimeConfig
from tests.kubernetes.manifests import (
    DEPLOY,
    FOLDER,
    KUBECTL,
    SOURCES,
    Manifest,
    copied,
    manifests,
    one,
    render,
    rendered_file,
)

ROOT = Path(__file__).parents[2]
OVERLAYS = sorted(set(SOURCES) - {"jobset"})
OLDEST = "1.29"  # the first with ReadWriteOncePod for everybody
VERSIONS = [OLDEST, "1.32", kubernetes_validate.latest_version()]
OTHERS_RESOURCES = {"JobSet", "PodMonitor", "PrometheusRule"}
CUT_OFF_SECONDS = 1
"""Anything that delays the exit is cut off so long after the drain time."""


def pods(name: str) -> list[Manifest]:
    """Returns the templates of all pods."""
    everything = manifests(name)
    if name == "jobset":
        return [job["template"]["spec"]["template"] for job in one("JobSet", everything)["spec"]["replicatedJobs"]]
    return [one("StatefulSet", everything)["spec"]["template"]]


def settings(name: str) -> dict[str, str]:
    return settings_among(manifests(name))[1]


def settings_among(objects: list[Manifest]) -> tuple[str, dict[str, str]]:
    """Returns the name of the servers' ConfigMap, which ends with a digest, and what is in it."""
    ((name, data),) = [
        (each["metadata"]["name"], each["data"])
        for each in objects
        if each["kind"] == "ConfigMap" and each["metadata"]["name"].startswith("gradserve-settings-")
    ]
    return name, data


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    return bool(selector["matchLabels"]) and selector["matchLabels"].items() <= labels.items()


@pytest.mark.skipif(KUBECTL is None, reason="there is no kubectl")
@pytest.mark.parametrize("name", SOURCES)
def test_rendered_files_are_up_to_date(name: str) -> None:
    assert rendered_file(name).read_text() == render(SOURCES[name]), "python -m tests.kubernetes.manifests"


def test_rules_and_dashboard_are_those_of_every_other_deployment() -> None:
    for path, text in copied().items():
        assert path.read_text() == text, "python -m tests.kubernetes.manifests"
    objects = manifests("alerts")
    rules = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())
    assert one("PrometheusRule", objects)["spec"] == rules
    (board,) = [each for each in objects if each["metadata"]["name"] == "gradserve-dashboard"]
    assert board["metadata"]["labels"]["grafana_dashboard"] == "1"  # by which the sidecar of Grafana finds it
    assert json.loads(board["data"]["gradserve.json"]) == dashboard()


def test_the_alerts_know_servers_by_the_job_that_prometheus_gives_them() -> None:
    objects = manifests("alerts")
    label = one("PodMonitor", objects)["spec"]["jobLabel"]
    job = one("StatefulSet", objects)["spec"]["template"]["metadata"]["labels"][label]
    named = re.findall(r'job="(\w+)"', json.dumps(one("PrometheusRule", objects)).replace('\\"', '"'))
    assert len(named) > 1
    assert set(named) == {job}


def test_every_overlay_is_rendered() -> None:
    assert {path.stem for path in (FOLDER / "rendered").iterdir()} == SOURCES.keys()


@pytest.mark.exhaustive
@pytest.mark.skipif(KUBECTL is None, reason="there is no kubectl")
def test_a_release_is_used_without_a_checkout(tmp_path: Path) -> None:
    """By the overlay of the page, with the release's tag in a repository beside it."""
    page = (ROOT / "docs" / "kubernetes_overlay.md").read_text()
    (overlay,) = [block for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL) if "?ref=" in block]
    repository, tag = tmp_path / "gradserve", f"v{gradserve.__version__}"
    assert set(re.findall(r"\?ref=(\S+)", overlay)) == {tag}
    subprocess.run(["git", "clone", "--quiet", "--depth", "1", ROOT.as_uri(), repository], check=True)
    subprocess.run(["git", "tag", tag], cwd=repository, check=True)
    own = tmp_path / "own"
    own.mkdir()
    (own / "kustomization.yaml").write_text(
        overlay.replace("https://git.example/training/gradserve", repository.as_uri())
    )
    objects = list(yaml.safe_load_all(render(own)))
    server = one("StatefulSet", objects)
    (container,) = server["spec"]["template"]["spec"]["containers"]
    assert server["metadata"]["namespace"] == "training"
    assert container["image"] == f"registry.example/gradserve:{gradserve.__version__}"
    assert settings_among(objects)[1]["GRADSERVE_STATE_DIR"] == settings("durable")["GRADSERVE_STATE_DIR"]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", SOURCES)
def test_the_schemas_of_kubernetes_accept_it(name: str, version: str) -> None:
    for manifest in manifests(name):
        if manifest["kind"] not in OTHERS_RESOURCES:
            kubernetes_validate.validate(manifest, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_schemas_of_kubernetes_accept_the_jobs_of_the_job_set(version: str) -> None:
    for job in one("JobSet", manifests("jobset"))["spec"]["replicatedJobs"]:
        whole = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": job["name"]}, **job["template"]}
        kubernetes_validate.validate(whole, version, strict=True)


def test_the_schemas_refuse_what_does_not_exist() -> None:
    wrong = one("StatefulSet", manifests("durable"))
    wrong["spec"]["template"]["spec"]["terminationGraceSeconds"] = 40
    with pytest.raises(kubernetes_validate.ValidationError, match="terminationGraceSeconds"):
        kubernetes_validate.validate(wrong, OLDEST, strict=True)


def contains(whole: object, part: object) -> bool:
    if isinstance(part, dict):
        return isinstance(whole, dict) and all(key in whole and contains(whole[key], part[key]) for key in part)
    if isinstance(part, list):
        return isinstance(whole, list) and len(whole) == len(part) and all(map(contains, whole, part))
    return whole == part


@pytest.fixture
def model_of_job_sets() -> Any:
    """Kubeflow's model, whose import takes half a second."""
    from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet

    return JobsetV1alpha2JobSet


def test_the_model_of_job_sets_knows_every_field(model_of_job_sets: Any) -> None:
    job_set = one("JobSet", manifests("jobset"))
    read = model_of_job_sets.from_dict(job_set)
    assert read is not None
    assert contains(read.to_dict(), job_set)  # it drops what it does not know, and adds defaults


def test_a_model_of_job_sets_drops_unknown_fields(model_of_job_sets: Any) -> None:
    job_set = one("JobSet", manifests("jobset"))
    job_set["spec"]["replicatedJobs"][0]["replica"] = 1
    read = model_of_job_sets.from_dict(job_set)
    assert read is not None
    assert not contains(read.to_dict(), job_set)


@pytest.mark.parametrize("name", SOURCES)
def test_pods_have_no_privileges_and_the_user_of_the_image(name: str) -> None:
    dockerfile = (FOLDER.parents[1] / "Dockerfile").read_text()
    user, group = re.findall(r"^USER (\d+):(\d+)$", dockerfile, re.MULTILINE)[0]
    for pod in pods(name):
        security = pod["spec"]["securityContext"]
        assert (security["runAsNonRoot"], security["runAsUser"], security["runAsGroup"]) == (
            True,
            int(user),
            int(group),
        )
        assert security["fsGroup"] == int(group)
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["spec"]["automountServiceAccountToken"] is False
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod["spec"].keys()
        for container in pod["spec"]["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }


@pytest.mark.parametrize("name", SOURCES)
def test_servers_get_more_time_to_stop_than_they_take(name: str) -> None:
    for pod in pods(name):
        (container,) = pod["spec"]["containers"]
        if container["name"] == "server":
            own = {variable["name"]: variable.get("value") for variable in container.get("env", ())}
            drain = float((own if name == "jobset" else settings(name))["GRADSERVE_DRAIN_SECONDS"])
            assert drain == RuntimeConfig().drain_seconds
            assert pod["spec"]["terminationGracePeriodSeconds"] >= drain + CUT_OFF_SECONDS + 5


@pytest.mark.parametrize("name", OVERLAYS)
def test_selectors_select_the_server_and_all_clients_reach_it(name: str) -> None:
    (server,) = pods(name)
    everything = manifests(name)
    labels = server["metadata"]["labels"]
    policy = one("NetworkPolicy", everything)["spec"]
    assert one("Service", everything)["spec"]["selector"].items() <= labels.items()
    assert selects(one("StatefulSet", everything)["spec"]["selector"], labels)
    assert selects(policy["podSelector"], labels)
    assert policy["egress"] == []
    ports = {port["name"] for port in server["spec"]["containers"][0]["ports"]}
    assert {port["port"] for rule in policy["ingress"] for port in rule["ports"]} == ports
    # Any pod with this label, whatever else it is.
    assert policy["ingress"][0]["from"] == [{"podSelector": {"matchLabels": {"gradserve-client": "true"}}}]
    for manifest in everything:
        if manifest["kind"] in ("PodDisruptionBudget", "PodMonitor"):
            assert selects(manifest["spec"]["selector"], labels)


@pytest.mark.parametrize(
    ("name", "budget"),
    [
        ("development", None),
        ("gpu", {"maxUnavailable": 0}),
        ("tls-and-tokens", {"maxUnavailable": 0}),
        ("durable", {"maxUnavailable": 1}),
        ("cluster", {"maxUnavailable": 1}),
        ("production", {"maxUnavailable": 1}),
    ],
)
def test_only_servers_that_keep_their_state_may_be_moved(name: str, budget: dict[str, int] | None) -> None:
    budgets = [manifest["spec"] for manifest in manifests(name) if manifest["kind"] == "PodDisruptionBudget"]
    assert [{key: value for key, value in spec.items() if key != "selector"} for spec in budgets] == (
        [] if budget is None else [budget]
    )


def test_a_gpu_is_asked_for_with_the_image_that_uses_it() -> None:
    (container,) = pods("gpu")[0]["spec"]["containers"]
    assert container["image"] == "gradserve:cuda13"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"


def test_prometheus_has_what_a_server_with_tls_and_tokens_asks_for() -> None:
    (endpoint,) = one("PodMonitor", manifests("production"))["spec"]["podMetricsEndpoints"]
    assert endpoint["scheme"] == "https"
    assert endpoint["tlsConfig"]["serverName"] == "gradserve-0.gradserve"
    assert endpoint["authorization"]["credentials"] == {"name": "gradserve-metrics", "key": "token"}


def test_the_job_set_waits_in_a_queue_and_its_workers_know_the_server() -> None:
    job_set = one("JobSet", manifests("jobset"))
    server, worker = job_set["spec"]["replicatedJobs"]
    assert job_set["metadata"]["labels"]["kueue.x-k8s.io/queue-name"]
    host = f"{job_set['metadata']['name']}-{server['name']}-0-0.{job_set['spec']['network']['subdomain']}"
    (container,) = worker["template"]["spec"]["template"]["spec"]["containers"]
    assert container["args"][0] == f"{host}:50051"
    assert container["args"][-2:] == ["--required", str(worker["template"]["spec"]["parallelism"])]
    assert job_set["spec"]["successPolicy"]["targetReplicatedJobs"] == [worker["name"]]
