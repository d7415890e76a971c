"""Commands that look at all servers of a cluster."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from textual.widgets import DataTable, Static

import gradserve
import gradserve.aio
from gradserve_protocol.server_status import (
    AccumulatorStatus,
    ErrorStatus,
    GradientTotals,
    MemoryStatus,
    MethodStatus,
    RoundStatus,
    ServerStatus,
    TrafficStatus,
    WorkerStatus,
)
from gradserve_server.commands.servers import Answer
from gradserve_server.commands.top.app import TopApp
from gradserve_server.commands.top.picture import Picture, whole
from gradserve_testing import LocalServer
from tests.cluster.servers import addresses_of, member, name_at, running_cluster
from tests.commands.conftest import CommandLine
from tests.commands.test_top import shows, text_of

SIZE = 3
NAMES = [name_at(home, SIZE, "several-") for home in range(SIZE)]


@dataclass(frozen=True)
class Cluster:
    """Three servers with an accumulator each, of which the last can be one that has ended."""

    addresses: list[str]

    @property
    def line(self) -> CommandLine:
        return CommandLine(",".join(self.addresses))

    def failing(self, *arguments: str) -> Any:
        """Returns what a command prints with --json although it ends with 1."""
        done = self.line.run(*arguments, "--json")
        assert done.exit_code == 1, done.output
        return json.loads(done.stdout)


@pytest.fixture(scope="module")
def servers() -> Iterator[list[LocalServer]]:
    with running_cluster(SIZE) as servers, gradserve.connect(addresses_of(servers)) as client:
        for at, each in enumerate(NAMES):
            acc = client.conditional_accumulator("float32", (2,), shared_name=each)
            for _ in range(at + 1):
                acc.apply_grad(np.ones(2, np.float32), local_step=acc.info().global_step, worker_id="w")
                acc.take_grad(1)
        yield servers


@pytest.fixture
def cluster(servers: list[LocalServer]) -> Cluster:
    return Cluster(addresses_of(servers))


@pytest.fixture
def broken(cluster: Cluster) -> Cluster:
    with ExitStack() as stack:
        gone = stack.enter_context(member("train", 1, SIZE)).address
    return Cluster([cluster.addresses[0], gone, cluster.addresses[2]])


def test_accumulators_are_listed_with_their_servers(cluster: Cluster) -> None:
    header, *rows = cluster.line.run("ls", "--name", "several-").stdout.splitlines()
    assert header.split()[:4] == ["SERVER", "CONTAINER", "NAME", "STEP"]
    assert [row.split()[:4] for row in rows] == [
        [str(home), "default", name, str(home + 1)] for name, home in sorted(zip(NAMES, range(SIZE), strict=True))
    ]
    found = cluster.line.json("ls", "--name", "several-")
    assert {each["name"]: each["server"] for each in found["accumulators"]} == dict(
        zip(NAMES, range(SIZE), strict=True)
    )
    assert found["num_accumulators"] == SIZE
    assert found["servers"] == [
        {"index": at, "address": each, "problem": ""} for at, each in enumerate(cluster.addresses)
    ]


def test_a_server_that_does_not_answer_hides_no_other(broken: Cluster) -> None:
    done = broken.line.run("ls", "--name", "several-")
    assert done.exit_code == 1
    assert {row.split()[2] for row in done.stdout.splitlines()[1:]} == {NAMES[0], NAMES[2]}
    assert done.stderr.startswith(f"server 1 at {broken.addresses[1]}: ")
    assert done.stderr.count("\n") == 1
    for command in ("ls", "top", "info"):
        problems = [each["problem"] for each in broken.failing(command)["servers"]]
        assert [bool(each) for each in problems] == [False, True, False], command


def test_an_accumulator_is_shown_and_deleted_at_its_home(broken: Cluster, servers: list[LocalServer]) -> None:
    """Other servers are not asked."""
    assert broken.line.run("show", "accumulator", NAMES[2]).stdout.startswith(f"default/{NAMES[2]}: step 3, ")
    done = broken.line.run("show", "accumulator", NAMES[1])
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith(f"server 1 at {broken.addresses[1]}: ")
    done = broken.line.run("show", "accumulator", name_at(0, SIZE, "nothing"))
    assert (done.exit_code, "no accumulator default/nothing" in done.stderr) == (1, True)
    names = [name_at(home, SIZE, "doomed") for home in range(SIZE)]
    with gradserve.connect(addresses_of(servers)) as client:
        for each in names:
            client.conditional_accumulator("float32", (), shared_name=each)
        done = broken.line.run("rm", "accumulators", *names, "--yes", "--json")
        assert done.exit_code == 1
        assert json.loads(done.stdout)["deleted"] == {names[0]: True, names[2]: True}
        assert f"server 1 at {broken.addresses[1]}: " in done.stderr
        assert [name for name in names if name in {each.name for each in client.list_accumulators()}] == [names[1]]
        client.delete_accumulator(names[1])


def test_sharded_parameters_are_shown_with_their_rounds(cluster: Cluster) -> None:
    name = name_at(1, SIZE, "shown-")
    with gradserve.connect(cluster.addresses) as client:
        found = client.parameters({"w": np.zeros(9, np.float32)}, shared_name=name, sharded=True)
        found.push({"w": np.ones(9, np.float32)}, 0, worker_id="w")
        shown = cluster.line.run("show", "parameters", name)
        assert (shown.exit_code, shown.stderr) == (0, "")
        assert "sharded over 3 servers" in shown.stdout
        assert shown.stdout.splitlines()[-1].split()[0] == "1", "the record of the round"
        of_home = CommandLine(cluster.addresses[1]).run("show", "parameters", name)
        assert of_home.exit_code == 0, "the home knows all but the records"
        assert "no records of rounds: expected a client of all 3 servers" in of_home.stdout
        client.delete_parameters(name)


def test_tensors_and_layers_are_found_wherever_they_are(cluster: Cluster) -> None:
    with gradserve.connect(cluster.addresses[1]) as client:
        handle = client.put(np.zeros((2, 3), np.float32)).handle
        client.batch_norm(scope="several/bn", input_shape=(None, 3), dtype="float32")
        assert [each.split()[:2] for each in cluster.line.run("ls", "tensors").stdout.splitlines()[1:]] == [
            ["1", handle]
        ]
        (layer,) = cluster.line.json("ls", "layers")["layers"]
        assert (layer["server"], layer["name"]) == (1, "several/bn")
        assert cluster.line.run("show", "tensor", handle).stdout == "float32 [2, 3]\n"
        assert cluster.line.json("show", "layer", "several/bn")["layer"]["num_updates"] == 0
        for kind, name in (("tensor", handle), ("layer", "several/bn")):
            assert cluster.line.run("rm", kind, name, "--yes").stdout == f"deleted {name}\n"
            done = cluster.line.run("rm", kind, name, "--yes")
            assert (done.exit_code, f"no {kind}s {name} on " in done.stderr) == (1, True)


def test_each_server_is_described(cluster: Cluster, broken: Cluster) -> None:
    lines = cluster.line.run("info").stdout.splitlines()
    assert [line for line in lines if line.startswith("server ")] == [
        f"server {at} at {each}:" for at, each in enumerate(cluster.addresses)
    ]
    assert "member of a cluster: train 2/3" in lines
    assert f"server 1 at {broken.addresses[1]}: no answer" in broken.line.run("info").stdout
    info = cluster.line.json("info")["servers"]
    assert [each["info"]["member"] for each in info] == ["train 0/3", "train 1/3", "train 2/3"]


def test_the_health_of_each_server(cluster: Cluster, broken: Cluster) -> None:
    done = cluster.line.run("health")
    assert done.exit_code == 0
    assert [line.split() for line in done.stdout.splitlines()] == [
        ["SERVER", "ADDRESS", "STATUS"],
        *([str(at), each, "SERVING"] for at, each in enumerate(cluster.addresses)),
    ]
    done = broken.line.run("health")
    assert done.exit_code == 1
    assert [line.split()[2] for line in done.stdout.splitlines()[1:]] == ["SERVING", "UNAVAILABLE", "SERVING"]
    assert done.stderr.startswith(f"server 1 at {broken.addresses[1]}: ")
    found = broken.failing("health")
    assert (found["serves"], [each["serves"] for each in found["servers"]]) == (False, [True, False, True])


def test_servers_in_another_order_are_named(cluster: Cluster) -> None:
    first, second, third = cluster.addresses
    mixed = Cluster([second, first, third])
    for command in (("ls",), ("top", "--json"), ("info",), ("show", "accumulator", NAMES[0])):
        done = mixed.line.run(*command)
        assert done.exit_code == 1
        assert f"server 0 at {second}: it is server 1 of 3 in cluster 'train', and 0 of 3 in this list" in done.stderr
    with member(None, 0, 1) as alone:
        done = Cluster([first, alone.address, third]).line.run("info")
    assert f"server 1 at {alone.address}: it is in no cluster, and 1 of 3 in this list" in done.stderr


def test_a_picture_of_a_cluster_is_printed_as_json(cluster: Cluster) -> None:
    found = cluster.line.json("top", "--name", "several-")
    assert found["num_accumulators"] == SIZE
    assert found["totals"]["rounds"] >= 6
    assert [each["status"]["accumulators"][0]["name"] for each in found["servers"]] == NAMES


async def test_a_cluster_is_followed_as_one(cluster: Cluster) -> None:
    """A server that goes away is named, and the others are still followed."""
    is_broken = False

    async def take_picture(part: str, order: str) -> Picture:
        found = []
        for at, each in enumerate(cluster.addresses):
            async with gradserve.aio.connect(each) as client:
                found.append(Answer(at, each, await client.server_status(name_contains=part, order=order)))
        if is_broken:
            found[1] = Answer(1, cluster.addresses[1], problem="nobody listens there")
        return found

    app = TopApp("h0,h1,h2", take_picture, 3600.0, "several-", num_servers=SIZE)
    async with app.run_test(size=(160, 50)) as pilot:
        table = app.query_one(DataTable)
        await shows(app, pilot, lambda: table.row_count == SIZE)
        assert {str(table.get_row(f"accumulator default/{name}")[-1]) for name in NAMES} == {"0", "1", "2"}
        await pilot.press("right_square_bracket")
        panel = text_of(app, "#servers-text").splitlines()
        assert panel[0].split()[:2] == ["SERVER", "ADDRESS"]
        assert [line.split()[1] for line in panel[1:]] == cluster.addresses
        is_broken = True
        await pilot.press("s")
        await shows(app, pilot, lambda: table.row_count == SIZE - 1)
        assert f"no answer: server 1 at {cluster.addresses[1]}: nobody" in str(
            app.query_one("#problem", Static).render()
        )
        assert "nobody listens there" in text_of(app, "#servers-text")


def test_a_whole_has_sums_and_one_clock() -> None:
    """The second server has started 40 s after the first."""

    def round_of(ended: float) -> tuple[RoundStatus, ...]:
        return (RoundStatus(step=1, began=ended - 1 if ended else 5.0, ended=ended),)

    def status(uptime: float, ended: float, times: int) -> ServerStatus:
        return ServerStatus(
            version="1",
            incarnation=f"run {uptime:g}",
            uptime=uptime,
            num_accumulators=times,
            accumulators=(AccumulatorStatus(name=f"n{times}", rounds=round_of(ended), rounds_per_second=times),),
            workers=(WorkerStatus("w", rounds=times, mean_lateness=times, waited_for=times, last_seen=ended),),
            traffic=(TrafficStatus("grpc", received_bytes=times, sent_bytes=2 * times, calls=3 * times),),
            memory=(MemoryStatus("sums", times, 10),),
            methods=(MethodStatus("S", "M", started=times, handled={"OK": times, f"E{times}": 1}),),
            errors=(ErrorStatus("M", "E", "wrong", 1, at=ended),),
            totals=GradientTotals(accepted=times, rounds=10 * times),
        )

    first, second = status(100.0, 90.0, 1), status(60.0, 55.0, 3)
    assert whole([Answer(0, "a", first)]) is first
    found = whole([Answer(0, "a", first), Answer(1, "b", problem="gone"), Answer(2, "c", second)])
    assert (found.uptime, found.incarnation, found.version) == (100.0, "0:run 100 2:run 60", "1")
    assert [(each.name, each.rounds[0].began, each.rounds[0].ended) for each in found.accumulators] == [
        ("n3", 94.0, 95.0),
        ("n1", 89.0, 90.0),
    ]
    (worker,) = found.workers
    assert (worker.rounds, worker.mean_lateness, worker.waited_for, worker.last_seen) == (4, 2.5, 4, 95.0)
    assert found.traffic == (TrafficStatus("grpc", 4, 8, 12),)
    assert found.memory == (MemoryStatus("sums", 4, 20),)
    assert found.methods[0].handled == {"OK": 4, "E1": 1, "E3": 1}
    assert [(each.message, each.at) for each in found.errors] == [("server 2: wrong", 95.0), ("server 0: wrong", 90.0)]
    assert (found.totals.accepted, found.totals.rounds, found.num_accumulators) == (4, 40, 4)
    open_round = whole([Answer(0, "a", first), Answer(1, "b", status(60.0, 0.0, 3))], "rate").accumulators[0].rounds[0]
    assert (open_round.began, open_round.ended) == (45.0, 0.0)


def test_a_pipe_gets_one_picture_of_all_servers(cluster: Cluster, broken: Cluster) -> None:
    done = cluster.line.run("top")
    assert (done.exit_code, done.stderr) == (0, "")
    servers = [line.split()[:2] for line in done.stdout.splitlines() if line[:6].strip().isdecimal()]
    assert servers == [[str(at), address] for at, address in enumerate(cluster.addresses)]
    failed = broken.line.run("top")
    assert failed.exit_code == 1
    assert f"server 1 at {broken.addresses[1]}" in failed.stderr
    assert NAMES[2] in failed.stdout
