"""The rendered pods, run: probes, signals, limits, secrets, and restarts under clients that go on training."""

import os
import signal
import ssl
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from http.client import HTTPSConnection
from pathlib import Path

import numpy as np
import pytest

import gradserve
from gradserve_server.security.access_file import DIGEST_PREFIX
from gradserve_server.security.authority import Authority
from gradserve_server.security.identity import digest_of, new_token
from tests.kubernetes.kubelet import Cluster, Pod, parse_quantity
from tests.kubernetes.machine import ROOT, can_run
from tests.kubernetes.manifests import Manifest, manifests, one
from tests.servers.polling import PATIENCE_SECONDS

pytestmark = pytest.mark.skipif(not can_run(), reason="takes root and Linux namespaces")

GRPC, BULK, HTTP = 50051, 50052, 50080
QUICK = {"GRADSERVE_WARM_UP": "false"}
"""Beside the settings of the manifests: no kernels are compiled for these few sums."""
NUM_WORKERS = 3
NUM_STEPS = 60
RESTARTS_AFTER = (15, 35)


def make_cluster(folder: Path, objects: list[Manifest]) -> Cluster:
    cluster = Cluster.with_ports(folder, GRPC, BULK, HTTP)
    cluster.environment.update(QUICK)
    cluster.apply(objects)
    return cluster


def template_of(objects: list[Manifest]) -> Manifest:
    template: Manifest = one("StatefulSet", objects)["spec"]["template"]
    return template


def fields(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def test_a_server_of_the_development_overlay(tmp_path: Path) -> None:
    objects = manifests("development")
    cluster = make_cluster(tmp_path, objects)
    limits = template_of(objects)["spec"]["containers"][0]["resources"]["limits"]
    with Pod("gradserve-0", template_of(objects), cluster, claims=tmp_path / "claims") as pod:
        pod.wait_for("ready")
        process = fields(pod.container.process.pid)
        root = Path(f"/proc/{pod.container.process.pid}/root")
        assert set(process["Uid"].split()) == set(process["Gid"].split()) == {"10001"}
        assert int(process["CapEff"], 16) == int(process["CapBnd"], 16) == 0
        assert process["NoNewPrivs"] == "1"
        assert os.statvfs(root).f_flag & os.ST_RDONLY
        with gradserve.connect(f"127.0.0.1:{cluster.ports[GRPC]}", timeout=PATIENCE_SECONDS) as client:
            limit = client.server_info().limits["max_bytes"]
            assert limit == parse_quantity(limits["memory"]) // 2
    assert pod.events == ["started", "ready", "stopped 0"]


def train(address: str, rank: int, at: dict[int, threading.Event]) -> list[tuple[int, float]]:
    """Returns the step and the average of every round, in the order in which a worker got them."""
    with gradserve.connect(address, timeout=PATIENCE_SECONDS) as client:
        model = client.gradient_accumulator({"w": np.zeros(4)}, shared_name="restarted")
        step = model.info().global_step
        got = []
        for _ in range(NUM_STEPS):
            pulled = model.push_pull(
                {"w": np.full(4, float((step + 1) * 3 * 2**rank))}, NUM_WORKERS, step, worker_id=f"worker-{rank}"
            )
            step = pulled.step
            got.append((step, float(pulled["w"][0])))
            if step in at:
                at[step].set()
        return got


def wait_for_step(
    step: int, reached: dict[int, threading.Event], workers: list[Future[list[tuple[int, float]]]]
) -> None:
    """Waits until the first worker has come to a step; raises what ended a worker before."""
    while not reached[step].wait(0.1):
        for worker in workers:
            assert not worker.done(), worker.result()


def test_rolling_restarts_lose_nothing_while_clients_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADSERVE_RESTART_PATIENCE", str(PATIENCE_SECONDS))
    objects = manifests("durable")
    cluster = make_cluster(tmp_path, objects)
    address = f"127.0.0.1:{cluster.ports[GRPC]}"
    reached = {step: threading.Event() for step in RESTARTS_AFTER}
    incarnations = set()
    with ThreadPoolExecutor(NUM_WORKERS) as threads:
        for number, step in enumerate([*RESTARTS_AFTER, None]):
            with Pod(f"run-{number}", template_of(objects), cluster, claims=tmp_path / "claims") as pod:
                pod.wait_for("ready")
                with gradserve.connect(address, timeout=PATIENCE_SECONDS) as client:
                    incarnations.add(client.server_info().incarnation)
                if number == 0:
                    workers = [threads.submit(train, address, rank, reached) for rank in range(NUM_WORKERS)]
                if step is None:
                    results = [worker.result() for worker in workers]
                else:
                    wait_for_step(step, reached, workers)
            assert pod.events == ["started", "ready", "stopped 0"]
    # Each gradient is in exactly one average: that of its step, which all workers get.
    weight = sum(2**rank for rank in range(NUM_WORKERS))
    assert results == [[(step, float(step * weight)) for step in range(1, NUM_STEPS + 1)]] * NUM_WORKERS
    assert len(incarnations) == 1 + len(RESTARTS_AFTER)


def test_a_stuck_server_is_killed_and_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADSERVE_RESTART_PATIENCE", str(PATIENCE_SECONDS))
    objects = manifests("durable")
    cluster = make_cluster(tmp_path, objects)
    address = f"127.0.0.1:{cluster.ports[GRPC]}"
    with Pod("gradserve-0", template_of(objects), cluster, claims=tmp_path / "claims", speed=20) as pod:
        pod.wait_for("ready")
        with gradserve.connect(address, timeout=PATIENCE_SECONDS) as client:
            model = client.gradient_accumulator({"w": np.zeros(4)}, shared_name="stuck")
            assert model.push_pull({"w": np.ones(4)}, 1, 0).step == 1
            pod.container.process.send_signal(signal.SIGSTOP)
            pod.wait_for("killed")
            pod.wait_for("ready", 2)
            assert model.push_pull({"w": np.ones(4)}, 1, 1).step == 2
    assert pod.events.index("unready") < pod.events.index("killed")  # clients are sent elsewhere long before that
    ends = [event for event in pod.events if event not in ("ready", "unready")]
    assert ends == ["started", "killed", "stopped -9", "started", "stopped 0"]


def test_a_server_in_production(tmp_path: Path) -> None:
    objects = manifests("production")
    cluster = make_cluster(tmp_path, objects)
    authority = Authority.in_folder(tmp_path / "authority")
    issued = authority.issue_server(["gradserve-0.gradserve", "127.0.0.1"], 30)
    ca = tmp_path / "authority" / "ca.pem"
    token = new_token()
    cluster.secrets["gradserve-tls"] = {
        "tls.crt": issued.certificate.read_bytes(),
        "tls.key": issued.key.read_bytes(),
        "ca.crt": ca.read_bytes(),
    }
    cluster.secrets["gradserve-access"] = {
        "access.toml": f"""
            [identities.trainer]
            tokens = ["{DIGEST_PREFIX}{digest_of(token).hex()}"]
            roles = {{ "*" = "chief" }}
        """.encode()
    }
    address = f"127.0.0.1:{cluster.ports[GRPC]}"
    with Pod("gradserve-0", template_of(objects), cluster, claims=tmp_path / "claims") as pod:
        pod.wait_for("ready")
        with gradserve.connect(address, tls=gradserve.TLS(ca), token=token, timeout=PATIENCE_SECONDS) as client:
            model = client.gradient_accumulator({"w": np.zeros(4)}, shared_name="guarded")
            assert model.push_pull({"w": np.ones(4)}, 1, 0).step == 1
        with (
            gradserve.connect(address, tls=gradserve.TLS(ca), timeout=PATIENCE_SECONDS) as stranger,
            pytest.raises(gradserve.UnauthenticatedError),
        ):
            stranger.server_info()
        # As its PodMonitor says: by the name in the certificate, with a token.
        (endpoint,) = one("PodMonitor", objects)["spec"]["podMetricsEndpoints"]
        trusted = ssl.create_default_context(cafile=str(ca))
        scraper = HTTPSConnection("127.0.0.1", cluster.ports[HTTP], context=trusted, timeout=PATIENCE_SECONDS)
        scraper.request("GET", endpoint["path"], headers={"Authorization": f"Bearer {token}"})
        reply = scraper.getresponse()
        assert reply.status == 200
        assert b"gradserve_gradients_total" in reply.read()
        scraper.close()
    assert pod.events == ["started", "ready", "stopped 0"]


def test_the_run_of_the_job_set(tmp_path: Path) -> None:
    objects = manifests("jobset")
    spec = one("JobSet", objects)["spec"]
    server, worker = (job["template"]["spec"]["template"] for job in spec["replicatedJobs"])
    cluster = make_cluster(tmp_path, objects)
    cluster.hosts["words-server-0-0.words"] = "127.0.0.1"
    cluster.config_maps["words-worker"] = {"words_worker.py": (ROOT / "examples" / "words_worker.py").read_text()}
    with Pod("server", server, cluster, claims=tmp_path / "claims") as served, ExitStack() as stack:
        served.wait_for("ready")
        workers = []
        for index in range(spec["replicatedJobs"][1]["template"]["spec"]["completions"]):
            pod = Pod(f"worker-{index}", worker, cluster, claims=tmp_path / "claims", completion_index=index)
            workers.append(stack.enter_context(pod))
        for pod in workers:
            pod.wait_for("completed")
            assert pod.events == ["started", "stopped 0", "completed"], pod.log
    assert served.events[:3] == ["started", "ready", "stopped 0"]
