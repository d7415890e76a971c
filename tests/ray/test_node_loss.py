"""A node of Ray is lost, with the server that was on it."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil
import pytest

import gradserve
from gradserve_testing.server_process import free_port
from tests.cluster.servers import name_at
from tests.ray.conftest import RayCluster, ray_folder
from tests.servers.polling import PATIENCE_SECONDS, eventually
from tests.servers.processes import has_ended

GRADIENT = {"w": np.arange(3, dtype=np.float32)}
NAME, SIZE = "nodes", 2
_NOTICED_SOON = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 5000,
    "health_check_failure_threshold": 3,
}
_MEMORY = 80 << 20


@pytest.fixture
def nodes(ray_token: str) -> Iterator[Any]:
    """A Ray with two nodes on this machine, which commands find; the head alone has room for all servers."""
    with ray_folder(ray_token) as (_, patch):
        from ray.cluster_utils import Cluster

        head = {
            "gcs_server_port": free_port(),
            "num_cpus": SIZE,
            "include_dashboard": False,
            "_system_config": _NOTICED_SOON,
        }
        running: Any = Cluster(initialize_head=True, head_node_args={**head, "object_store_memory": _MEMORY})
        try:
            running.add_node(num_cpus=1, object_store_memory=_MEMORY)
            patch.setenv("RAY_ADDRESS", running.address)
            yield running
        finally:
            running.shutdown()


def raylet_of(server: dict[str, Any]) -> int:
    """Returns the process of the node that a server is on: the parent of its actor."""
    return psutil.Process(server["pid"]).parent().ppid()  # type: ignore[union-attr]


def test_the_server_is_back_on_another_node_with_its_state(nodes: Any, tmp_path: Any) -> None:
    """Its folder is one that both nodes reach. The client of before connects again; nothing acknowledged is lost."""
    cluster = RayCluster()
    up = ("up", "--servers", str(SIZE), "--name", NAME, "--state-dir", str(tmp_path))
    cluster.run(*up, "--timeout", str(4 * PATIENCE_SECONDS), "--", "--warm-up", "false")
    (lost,) = nodes.worker_nodes
    raylet = lost.all_processes["raylet"][0].process.pid
    before = cluster.status(NAME)
    (index,) = [each["index"] for each in before if raylet_of(each) == raylet]
    with gradserve.connect(f"gradserve+ray://{NAME}", timeout=PATIENCE_SECONDS) as client:
        for home in range(SIZE):
            net = client.gradient_accumulator(GRADIENT, name_at(home, SIZE), durability="gradient")
            net.push_pull(GRADIENT, 1, 0)
            net.apply_grad(GRADIENT, 1, worker_id="a")
    server = psutil.Process(before[index]["pid"])
    nodes.remove_node(lost, allow_graceful=False)
    eventually(lambda: has_ended(server))  # with its actor, which notices the end of the node
    after = eventually(
        lambda: cluster.status(NAME),
        lambda seen: all(each["serves"] for each in seen) and seen[index]["pid"] not in (0, before[index]["pid"]),
    )
    assert after[1 - index]["pid"] == before[1 - index]["pid"], "the other server never noticed"
    assert len({raylet_of(each) for each in after}) == 1
    with gradserve.connect(f"gradserve+ray://{NAME}", timeout=PATIENCE_SECONDS) as client:
        for home in range(SIZE):
            net = client.gradient_accumulator(GRADIENT, name_at(home, SIZE), durability="gradient")
            net.apply_grad({"w": 3 * GRADIENT["w"]}, 1, worker_id="b")
            np.testing.assert_array_equal(net.take_grad(2)["w"], 2 * GRADIENT["w"])
            assert net.info().global_step == 2
    cluster.run("down", NAME)
