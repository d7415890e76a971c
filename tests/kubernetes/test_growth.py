"""The overlay with several servers grows from three to four, in the way of docs/kubernetes_cluster.md."""

import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import yaml
from numpy.typing import NDArray

import gradserve
from gradserve_protocol.address import addresses_to_connect
from gradserve_protocol.placement import home_of
from tests.cluster.servers import addresses_of, name_at, running_cluster
from tests.kubernetes.kubelet import Cluster, Pod
from tests.kubernetes.machine import can_run
from tests.kubernetes.manifests import FOLDER, KUBECTL, Manifest, manifests, one, render
from tests.kubernetes.stateful_set import StatefulSet
from tests.kubernetes.test_cluster import BULK, GRPC, HTTP
from tests.kubernetes.test_manifests import settings_among
from tests.servers.polling import PATIENCE_SECONDS

BEFORE, AFTER = 3, 4
NUM_WORKERS = 2
NUM_STEPS = 5
NAMES = [name_at(home, AFTER, "part") for home in range(AFTER)]
"""One part of the model for each server, once there are four."""
SCALED = "GRADSERVE_CLUSTER_INDEX: expected a number below cluster_size, 3, got 3"

pytestmark = pytest.mark.skipif(KUBECTL is None or not can_run(), reason="takes kubectl, root and Linux namespaces")

Weights = list[NDArray[np.float64]]


def grown(folder: Path) -> list[Manifest]:
    """Returns the overlay after the two edits that it says are necessary: the number, and the list of addresses."""
    shutil.copytree(FOLDER, folder)
    file = folder / "overlays" / "cluster" / "kustomization.yaml"
    text = file.read_text()
    last, further = (f"gradserve-{index}.gradserve:{GRPC}" for index in (BEFORE - 1, AFTER - 1))
    for old, new in ((f"count: {BEFORE}", f"count: {AFTER}"), (last, f"{last},{further}")):
        assert text.count(old) == 1
        text = text.replace(old, new)
    file.write_text(text)
    return list(yaml.safe_load_all(render(file.parent)))


def pods_of(folder: Path, objects: list[Manifest], number: int) -> list[Cluster]:
    clusters = [Cluster.with_ports(folder, GRPC, BULK, HTTP) for _ in range(number)]
    for each in clusters:
        each.environment["GRADSERVE_WARM_UP"] = "false"
        each.apply(objects)
    return clusters


def addresses_in(clusters: Sequence[Cluster]) -> list[str]:
    return [f"127.0.0.1:{each.ports[GRPC]}" for each in clusters]


def train(addresses: Sequence[str], checkpoint: Weights) -> list[Weights]:
    """Trains for some steps from a checkpoint; returns the weights of each worker."""

    def work(rank: int) -> Weights:
        weights = [each.copy() for each in checkpoint]
        with gradserve.connect(addresses, timeout=PATIENCE_SECONDS) as client:
            parts = [client.gradient_accumulator({"w": each}, name) for each, name in zip(weights, NAMES, strict=True)]
            for step in range(NUM_STEPS):
                for part, w in zip(parts, weights, strict=True):
                    pulled = part.push_pull({"w": w - (rank + 1) / 3}, NUM_WORKERS, step, worker_id=f"worker-{rank}")
                    w -= 0.01 * pulled["w"]
        return weights

    with ThreadPoolExecutor(NUM_WORKERS) as threads:
        return list(threads.map(work, range(NUM_WORKERS)))


def homes(addresses: Sequence[str]) -> list[set[str]]:
    """Returns the names on each server."""
    found = []
    for each in addresses:
        with gradserve.connect(each) as client:
            found.append({info.name for info in client.list_accumulators()})
    return found


def test_a_run_goes_on_from_its_checkpoint_on_four_servers(tmp_path: Path) -> None:
    """It ends with the bits of a run that was never interrupted: the second half of it starts over at step 0."""
    old, new = manifests("cluster"), grown(tmp_path / "kubernetes")
    assert settings_among(new)[1]["GRADSERVE_CLUSTER_SIZE"] == str(AFTER)
    (servers,) = [each["data"] for each in new if each["metadata"]["name"] == "gradserve-servers"]
    assert len(addresses_to_connect(servers["GRADSERVE_ADDRESS"])) == AFTER
    start = [np.linspace(-1, 1, 8) * (part + 1) for part in range(len(NAMES))]
    claims = tmp_path / "claims"
    clusters = pods_of(tmp_path / "before", old, BEFORE)
    with StatefulSet(one("StatefulSet", old), clusters, claims=claims):
        first, second = train(addresses_in(clusters), start)
        assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    shutil.rmtree(claims)  # kubectl delete pvc
    clusters = pods_of(tmp_path / "after", new, AFTER)
    with StatefulSet(one("StatefulSet", new), clusters, claims=claims):
        addresses = addresses_in(clusters)
        with (
            gradserve.connect(addresses[:BEFORE]) as late,
            pytest.raises(
                gradserve.InvalidArgumentError,
                match="is server 0 of 4 in cluster 'gradserve', and 0 of 3 in the client's",
            ),
        ):
            late.gradient_accumulator({"w": start[0]}, name_at(0, BEFORE))
        ends = train(addresses, first)
        assert homes(addresses) == [{name} for name in NAMES]
    with running_cluster(BEFORE) as reference:
        halfway = train(addresses_of(reference), start)[0]
    with running_cluster(BEFORE) as reference:
        expected = train(addresses_of(reference), halfway)
    for worker, wanted in zip(ends, expected, strict=True):
        assert [each.tobytes() for each in worker] == [each.tobytes() for each in wanted]


def test_volumes_of_before_and_a_number_alone_are_refused(tmp_path: Path) -> None:
    """Servers say why they do not start: on volumes that were not deleted, and after `kubectl scale` alone."""
    old, new = manifests("cluster"), grown(tmp_path / "kubernetes")
    claims = tmp_path / "claims"
    moving = next(name for number in range(1000) if home_of("", name := f"net{number}", AFTER) == 3)
    clusters = pods_of(tmp_path / "before", old, BEFORE)
    with (
        StatefulSet(one("StatefulSet", old), clusters, claims=claims),
        gradserve.connect(addresses_in(clusters), timeout=PATIENCE_SECONDS) as client,
    ):
        client.gradient_accumulator({"w": np.zeros(2)}, moving)
    home = home_of("", moving, BEFORE)
    stays = f"accumulator 'default/{moving}' belongs to server 3 of cluster 'gradserve'"
    for objects, index, status, message in ((new, home, 1, stays), (old, BEFORE, 2, SCALED)):
        template = one("StatefulSet", objects)["spec"]["template"]
        (cluster,) = pods_of(tmp_path / f"refused-{index}", objects, 1)
        with Pod("pod", template, cluster, claims=claims / f"gradserve-{index}", pod_index=index) as pod:
            pod.wait_for(f"stopped {status}")
        assert message in pod.log
