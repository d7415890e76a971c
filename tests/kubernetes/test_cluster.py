"""The overlay with several servers: rendered for any number of them, and restarted one by one under their workers."""

import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import yaml

import gradserve
from gradserve_protocol.address import addresses_to_connect
from tests.cluster.servers import addresses_of, name_at, running_cluster
from tests.kubernetes.kubelet import Cluster
from tests.kubernetes.machine import can_run
from tests.kubernetes.manifests import FOLDER, KUBECTL, Manifest, manifests, one, render
from tests.kubernetes.stateful_set import StatefulSet
from tests.kubernetes.test_manifests import settings_among
from tests.servers.polling import PATIENCE_SECONDS

GRPC, BULK, HTTP = 50051, 50052, 50080
SIZE = 3
NUM_WORKERS = 2
"""Their sum has the same bits in either order."""
OWN_OVERLAY = """
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
namespace: training
resources: [{base}]
components: [{components}/durable, {components}/cluster]
replicas: [{{name: gradserve, count: 5}}]
transformers: [{components}/cluster/size]
"""


def test_the_number_of_servers_is_the_same_everywhere() -> None:
    objects = manifests("cluster")
    _, settings = settings_among(objects)
    assert settings["GRADSERVE_CLUSTER_SIZE"] == str(SIZE)
    assert one("StatefulSet", objects)["spec"]["replicas"] == SIZE
    (servers,) = [each["data"] for each in objects if each["metadata"]["name"] == "gradserve-servers"]
    addresses = addresses_to_connect(servers["GRADSERVE_ADDRESS"])
    assert [str(each) for each in addresses] == [f"gradserve-{index}.gradserve:{GRPC}" for index in range(SIZE)]


@pytest.mark.skipif(KUBECTL is None, reason="there is no kubectl")
def test_an_overlay_of_ones_own_has_another_number_of_servers(tmp_path: Path) -> None:
    folder = os.path.relpath(FOLDER, tmp_path.resolve())
    text = OWN_OVERLAY.format(base=f"{folder}/base", components=f"{folder}/components")
    (tmp_path / "kustomization.yaml").write_text(text)
    own = list(yaml.safe_load_all(render(tmp_path.resolve())))
    name, settings = settings_among(own)
    assert settings["GRADSERVE_CLUSTER_SIZE"] == "5"
    assert one("StatefulSet", own)["spec"]["replicas"] == 5
    # Another number is another name, which restarts the servers.
    assert name != settings_among(manifests("cluster"))[0]


def test_dns_has_records_of_all_servers_under_the_name_that_clients_ask_for() -> None:
    """Kubernetes makes SRV records _PORT._PROTOCOL.SERVICE for the named ports of a headless service."""
    service = one("Service", manifests("cluster"))["spec"]
    assert (service["clusterIP"], service["publishNotReadyAddresses"]) == ("None", True)
    (port,) = [port for port in service["ports"] if port["name"] == "grpc"]
    assert port["port"] == GRPC
    assert port.get("protocol", "TCP") == "TCP"


class Training:
    """When the workers of a training run end: all after the same step, while they keep each other's pace."""

    def __init__(self, last_step: int | None = None) -> None:
        self._changed = threading.Condition()
        self._step = 0
        self._last = last_step

    def goes_on(self, step: int) -> bool:
        """True if a worker that has come to this step is to do another one."""
        with self._changed:
            self._step = max(self._step, step)
            self._changed.notify_all()
            return self._last is None or step < self._last

    def wait_for_steps(self, count: int, workers: Sequence[Future[list[bytes]]]) -> None:
        """Waits until a worker has done some more steps; raises what ended a worker before."""
        with self._changed:
            wanted = self._step + count
            while not self._changed.wait_for(lambda: self._step >= wanted, 0.1):
                for worker in workers:
                    assert not worker.done(), worker.result()

    def end(self) -> None:
        with self._changed:
            self._last = self._step + 1


def train(addresses: Sequence[str], rank: int, training: Training) -> list[bytes]:
    """Trains a model in as many parts as there are servers; returns the bits of all parameters after each step."""
    names = [name_at(home, SIZE) for home in range(SIZE)]
    weights = [np.linspace(-1, 1, 8) * (home + 1) for home in range(SIZE)]
    got: list[bytes] = []
    with gradserve.connect(addresses, timeout=PATIENCE_SECONDS) as client:
        parts = [
            client.gradient_accumulator({"w": each}, shared_name=name)
            for each, name in zip(weights, names, strict=True)
        ]
        while training.goes_on(step := len(got)):
            for part, w in zip(parts, weights, strict=True):
                pulled = part.push_pull({"w": w - (rank + 1) / 3}, NUM_WORKERS, step, worker_id=f"worker-{rank}")
                assert pulled.step == step + 1
                w -= 0.01 * pulled["w"]
            got.append(b"".join(w.tobytes() for w in weights))
    return got


def undisturbed(num_steps: int) -> list[list[bytes]]:
    """Returns what workers get of servers that are not restarted."""
    with running_cluster(SIZE) as servers, ThreadPoolExecutor(NUM_WORKERS) as threads:
        addresses = addresses_of(servers)
        return list(threads.map(lambda rank: train(addresses, rank, Training(num_steps)), range(NUM_WORKERS)))


def clusters_of(folder: Path, objects: list[Manifest]) -> list[Cluster]:
    """Returns what each pod is made of: as pods share this machine, each has ports of its own."""
    clusters = [Cluster.with_ports(folder / "pods", GRPC, BULK, HTTP) for _ in range(SIZE)]
    for each in clusters:
        each.environment["GRADSERVE_WARM_UP"] = "false"
        each.apply(objects)
    return clusters


@pytest.mark.skipif(not can_run(), reason="takes root and Linux namespaces")
def test_a_rolling_restart_loses_nothing_that_was_acknowledged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADSERVE_RESTART_PATIENCE", str(PATIENCE_SECONDS))
    objects = manifests("cluster")
    clusters = clusters_of(tmp_path, objects)
    addresses = [f"127.0.0.1:{each.ports[GRPC]}" for each in clusters]
    training = Training()
    with (
        StatefulSet(one("StatefulSet", objects), clusters, claims=tmp_path / "claims") as servers,
        gradserve.connect(addresses, timeout=PATIENCE_SECONDS) as client,
        ThreadPoolExecutor(NUM_WORKERS) as threads,
    ):
        # On each server a gradient of a round that does not end before the restart.
        held = [client.gradient_accumulator({"w": np.zeros(2)}, name_at(home, SIZE, "held")) for home in range(SIZE)]
        for each in held:
            each.apply_grad({"w": np.ones(2)}, 0, worker_id="first")
        workers = [threads.submit(train, addresses, rank, training) for rank in range(NUM_WORKERS)]
        try:
            for index in reversed(range(SIZE)):  # as a rolling update does
                training.wait_for_steps(3, workers)
                servers.restart(index)
            training.wait_for_steps(3, workers)
        finally:
            training.end()
        results = [worker.result() for worker in workers]
        for each in held:
            each.apply_grad({"w": np.full(2, 3.0)}, 0, worker_id="second")
            np.testing.assert_array_equal(each.take_grad(2)["w"], [2.0, 2.0])
    assert results == undisturbed(len(results[0]))
    ends = [pod.events for pod in [*servers.deleted, *servers.pods]]
    assert ends == [["started", "ready", "stopped 0"]] * 2 * SIZE
