"""A cluster on a real Ray: training on it, faults, and what its commands say."""

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import psutil
import pytest
from click.testing import CliRunner
from rich.console import Console

import gradserve
from gradserve import aio
from gradserve.discovery.ray import NAMESPACE, directory_name
from gradserve_demo.coordinator import run_demo
from gradserve_demo.options import DemoOptions
from gradserve_demo.report import DemoReport
from gradserve_ray.directory import Directory, MemberRecord
from gradserve_server.commands.cli import cli
from tests.cluster.servers import name_at
from tests.project.blocks.reading import read_blocks
from tests.ray.conftest import RayCluster
from tests.servers.polling import PATIENCE_SECONDS, eventually
from tests.servers.processes import has_ended

GRADIENT = {"w": np.arange(3, dtype=np.float32)}
ADDRESS = "gradserve+ray://train"
RAY_TRAIN = Path(__file__).parents[2] / "examples" / "ray_train" / "digits.py"


def is_connected_to_ray() -> bool:
    """Imports Ray late: it reads the environment that the cluster needs when it is imported."""
    import ray

    return bool(ray.is_initialized())


def connected() -> gradserve.Client:
    return gradserve.connect(ADDRESS, timeout=PATIENCE_SECONDS)


def test_a_client_finds_all_servers_in_their_order(cluster: RayCluster) -> None:
    """Each accumulator is at its home, and this process is not left connected to Ray."""
    before = signal.getsignal(signal.SIGTERM)
    with connected() as client:
        assert client.address == ",".join(each["address"] for each in cluster.status())
        for home in range(cluster.size):
            net = client.gradient_accumulator(GRADIENT, name_at(home, cluster.size, "found"))
            np.testing.assert_array_equal(net.push_pull(GRADIENT, 1, 0)["w"], GRADIENT["w"])
    assert not is_connected_to_ray()
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_program_of_the_page_runs(cluster: RayCluster) -> None:
    (program,) = [block.text for block in read_blocks("docs/howto/ray.md") if block.language == "python"]
    assert cluster.name in program
    exec(compile(program, "docs/howto/ray.md", "exec"), {})  # noqa: S102
    with connected() as client:
        assert {"decoder", "encoder"} <= {info.name for info in client.list_accumulators()}


async def test_an_asyncio_client_in_a_process_that_ray_has(cluster: RayCluster) -> None:
    """The connection to Ray is used and stays."""
    import ray

    ray.init(address="auto", log_to_driver=False)
    try:
        async with aio.connect(ADDRESS) as client:
            net = await client.gradient_accumulator(GRADIENT, name_at(1, cluster.size, "aio"))
            average = await net.push_pull(GRADIENT, 1, 0)
            np.testing.assert_array_equal(average["w"], GRADIENT["w"])
        assert ray.is_initialized()
    finally:
        ray.shutdown()


@pytest.mark.parametrize("killed", ["server", "actor"])
def test_what_was_acknowledged_survives(cluster: RayCluster, killed: str) -> None:
    """A killed server is back at its address. One whose actor is killed ends with it, and is back with the next."""
    index = 1
    with closing(connected()) as client:
        before = cluster.status()[index]
        net = client.gradient_accumulator(GRADIENT, name_at(index, cluster.size, killed), durability="round")
        net.push_pull(GRADIENT, 1, 0)
        net.apply_grad(GRADIENT, 1, worker_id="a")
        server = psutil.Process(before["pid"])
        os.kill(server.pid if killed == "server" else server.ppid(), signal.SIGKILL)
        eventually(lambda: has_ended(server))
        net.apply_grad(GRADIENT, 1, worker_id="b")
        np.testing.assert_array_equal(net.take_grad(2)["w"], GRADIENT["w"])
        assert net.info().global_step == 2
    after = cluster.back(index, before["restarts"] + 1)
    assert after["address"] == before["address"]
    assert after["pid"] != before["pid"]
    assert after["state"] == "running"


def test_a_directory_that_is_killed_soon_knows_all_servers(cluster: RayCluster) -> None:
    import ray

    from gradserve.discovery.ray import connected_to_ray

    before = cluster.status()
    with connected_to_ray():
        ray.kill(ray.get_actor(directory_name(cluster.name), namespace=NAMESPACE), no_restart=False)
    after = eventually(cluster.status, lambda seen: all(each["serves"] for each in seen))
    assert after == before


def test_what_ray_prints_is_not_in_the_output_of_commands(
    cluster: RayCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    """A thread of Ray prints to standard output that a node has gone, among the JSON of `status`, for one."""
    from ray._private.worker import print_to_stdstream

    from gradserve.discovery.ray import connected_to_ray

    with connected_to_ray():
        print_to_stdstream({"lines": ["The node has gone"], "pid": "raylet", "is_err": False}, ignore_prefix=False)
    output, errors = capsys.readouterr()
    assert output == ""
    assert "The node has gone" in errors


def test_a_server_that_is_elsewhere_does_not_serve(cluster: RayCluster) -> None:
    """The status says why, for each of them."""
    done = cluster.run("status", "--tls", fails=True)
    assert "UNAVAILABLE" in done.stdout
    assert [line.partition(": ")[0] for line in done.stderr.splitlines()] == ["server 0", "server 1", "server 2"]


def test_the_status_is_a_table(cluster: RayCluster) -> None:
    header, *rows = cluster.run("status").stdout.splitlines()
    assert header.split() == ["INDEX", "ADDRESS", "NODE", "STATE", "RESTARTS", "STATUS"]
    assert [(row.split()[0], *row.split()[3::2]) for row in rows] == [
        (str(index), "running", "SERVING") for index in range(cluster.size)
    ]


def test_commands_take_the_name_of_the_cluster(cluster: RayCluster) -> None:
    with connected() as client:
        names = [name_at(home, cluster.size, "listed") for home in range(cluster.size)]
        for each in names:
            client.gradient_accumulator(GRADIENT, each)
        done = CliRunner().invoke(cli, ["ls", "--address", ADDRESS, "--name", "listed", "--json"])
        found = json.loads(done.stdout)
        assert {each["name"]: each["server"] for each in found["accumulators"]} == {
            name: home for home, name in enumerate(names)
        }
        done = CliRunner().invoke(cli, ["health", ADDRESS])
        assert (done.exit_code, done.stdout.count("SERVING")) == (0, cluster.size)


@pytest.mark.skipif(find_spec("pyarrow") is None, reason="ray[train] is not installed: make install-frameworks")
def test_workers_of_ray_train_end_with_equal_weights(cluster: RayCluster, tmp_path: Path) -> None:
    """Two programs at once, as both wait for Ray most of the time: the example, and that of ray_train.md."""
    (program,) = [block.text for block in read_blocks("docs/howto/ray_train.md") if block.language == "python"]
    (tmp_path / "train.py").write_text(program.replace("workers=2", "workers=2, resources_per_worker={'CPU': 0.2}"))
    environment = {**os.environ, "HOME": str(tmp_path)}  # where Ray Train keeps results
    command = [sys.executable, "train.py"]
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as of_page:
        command = [sys.executable, str(RAY_TRAIN), ADDRESS, "--workers", "2", "--cpus-per-worker", "0.2"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=4 * PATIENCE_SECONDS, check=False)
        printed, _ = of_page.communicate(timeout=4 * PATIENCE_SECONDS)
    assert done.returncode == 0, done.stderr
    found = re.findall(r"^worker (\d): step (\d+), weights (\w+)$", done.stdout, re.MULTILINE)
    assert [(rank, step) for rank, step, _ in found] == [("0", "100"), ("1", "100")], done.stdout
    assert len({weights for *_, weights in found}) == 1, done.stdout
    accuracy = re.search(r"^(\S+)% of the test digits$", done.stdout, re.MULTILINE)
    assert accuracy is not None
    assert float(accuracy[1]) > 85
    with connected() as client:
        runs = [each for each in client.list_accumulators() if each.name.startswith("digits-")]
    assert max(each.global_step for each in runs) == 100
    assert of_page.returncode == 0, printed
    ends = dict(re.findall(r"pid=(\d+)\)\S* step 50 weights (\S.*)$", printed, re.MULTILINE))
    assert len(ends) == 2, printed
    assert len(set(ends.values())) == 1, printed


def test_a_second_cluster_comes_and_goes(cluster: RayCluster) -> None:
    """It needs a name of its own and leaves the first one alone; commands then need a name."""
    up = ("up", "--servers", "1", "--cpus-per-server", "0.1", "--timeout", str(4 * PATIENCE_SECONDS), "--name")
    assert "'train' is there already" in cluster.run(*up, "train", fails=True).output
    cluster.run(*up, "other", "--", "--warm-up", "false")
    (server,) = cluster.status("other")
    assert "say which cluster: there are other, train" in cluster.run("status", fails=True).output
    assert cluster.run("down", "other").stdout == "other has ended\n"
    assert not psutil.pid_exists(server["pid"])
    assert "no cluster 'other' on this Ray; there are train" in cluster.run("status", "other", fails=True).output
    assert all(each["serves"] for each in cluster.status())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--gpus-per-server", "1000", "--timeout", "1"),
            "Ray had no room for 1 servers with 1 CPU and 1000 GPU each within 1 s; ",
        ),
        (("--cpus-per-server", "0.1", "--", "--max-bytes", "lots"), r"server 0 has ended: exit status 2"),
    ],
    ids=["no room", "a wrong flag"],
)
def test_a_cluster_that_does_not_start_leaves_nothing(
    cluster: RayCluster, options: tuple[str, ...], message: str
) -> None:
    done = cluster.run("up", "--servers", "1", "--name", "failing", *options, fails=True)
    assert message in done.output
    assert "no cluster 'failing'" in cluster.run("down", "failing", fails=True).output


def test_a_client_of_no_cluster(cluster: RayCluster) -> None:
    with pytest.raises(gradserve.NotFoundError, match="gradserve cluster up --name nobody --servers N"):
        gradserve.connect("gradserve+ray://nobody")
    assert not is_connected_to_ray()


def test_a_client_waits_for_servers_that_are_not_up(cluster: RayCluster) -> None:
    """As long as its timeout says; then it names them."""
    import ray

    from gradserve.discovery.ray import connected_to_ray

    with connected_to_ray():
        name = directory_name("half")
        directory = ray.remote(Directory).options(name=name, namespace=NAMESPACE, num_cpus=0).remote(3, None)
        ray.get(directory.report.remote(MemberRecord(1, "127.0.0.1:2")))
        with pytest.raises(gradserve.DeadlineExceededError, match=r"3 servers of cluster 'half' .* yet: 0, 2; `g"):
            gradserve.connect("gradserve+ray://half", timeout=0.5)
        for index in (0, 2):
            directory.report.remote(MemberRecord(index, f"127.0.0.1:{index + 1}"))
        with gradserve.connect("gradserve+ray://half") as client:
            assert client.address == "127.0.0.1:1,127.0.0.1:2,127.0.0.1:3"
        ray.kill(directory)


def test_the_demo_ends_as_on_one_server(
    cluster: RayCluster, server_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit: with two workers, the order of a sum does not matter."""
    reports: list[DemoReport] = []

    def recorded(options: DemoOptions, *, console: Console) -> DemoReport:
        reports.append(run_demo(options, console=console))
        return reports[-1]

    monkeypatch.setattr("gradserve_demo.coordinator.run_demo", recorded)
    for address in (ADDRESS, server_address):
        options = ("--workers", "2", "--epochs", "1", "--output", str(tmp_path))
        done = CliRunner().invoke(cli, ["demo", "--address", address, *options])
        assert done.exit_code == 0, done.output
    on_ray, on_one = (report.distributed for report in reports)
    assert on_ray.final_accuracy == on_one.final_accuracy
    assert all(np.array_equal(on_ray.weights[name], on_one.weights[name]) for name in on_one.weights)


def test_the_demo_says_that_there_is_no_cluster(cluster: RayCluster) -> None:
    done = CliRunner().invoke(cli, ["demo", "--address", "gradserve+ray://nobody"])
    assert (done.exit_code, "Error: no cluster 'nobody' on this Ray" in done.output) == (1, True)
