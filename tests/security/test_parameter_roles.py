"""Who may do what with parameters, beyond the rule of each method."""

from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import pytest

from gradserve_testing import LocalServer
from tests.rpc.parameters.requests import Fork, Read, create, push, push_pull, ref
from tests.security.serving import TOKENS, entry, serving
from tests.servers.raw_calls import RawCalls

DENIED, NOT_FOUND = grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.NOT_FOUND


@contextmanager
def calls_of(server: LocalServer, name: str) -> Iterator[RawCalls]:
    with RawCalls(server.address, TOKENS[name]) as calls:
        yield calls


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    """A server whose chief is one in two containers, and a worker in a third."""
    roles = {"team": "chief", "others": "chief", "source": "worker"}
    lines = entry("chief", roles, TOKENS["chief"]) + entry("worker", {"team": "worker"}, TOKENS["worker"])
    lines += entry("admin", {"*": "admin"}, TOKENS["admin"])
    with serving(tmp_path_factory.mktemp("access") / "access.toml", lines) as local:
        yield local


def in_team(name: str, container: str = "team") -> dict[str, str]:
    return {"name": name, "container": container}


def test_workers_only_find_parameters(shared: LocalServer) -> None:
    with calls_of(shared, "chief") as chief, calls_of(shared, "worker") as worker:
        with_values, without = create("found"), create("found", values=[])
        for request in (with_values, without):
            request.parameters.container = "team"
        assert worker.fail("CreateParameters", with_values).code is DENIED
        assert worker.fail("CreateParameters", without).code is NOT_FOUND
        assert chief.call("CreateParameters", with_values).created
        for request in (with_values, without):
            assert not worker.call("CreateParameters", request).created


def test_workers_read_and_push(shared: LocalServer) -> None:
    with calls_of(shared, "chief") as chief, calls_of(shared, "worker") as worker:
        request = create("used")
        request.parameters.container = "team"
        chief.call("CreateParameters", request)
        pushed, pulled = push("used"), push_pull("used", local_step=1)
        for each in (pushed, pulled):
            each.parameters.container = "team"
        worker.call("Push", pushed)
        worker.call("PushPullParameters", pulled)
        read = Read(parameters=ref(**in_team("used")), with_state=True)
        assert worker.call("ReadParameters", read).version.step == 2


@pytest.mark.parametrize(
    ("source", "target", "denied"),
    [("team", "others", ""), ("team", "team", ""), ("source", "team", "source"), ("team", "source", "source")],
)
def test_a_fork_needs_the_role_in_both_containers(shared: LocalServer, source: str, target: str, denied: str) -> None:
    with calls_of(shared, "admin") as admin, calls_of(shared, "chief") as chief:
        name = f"{source} to {target}"
        request = create(name)
        request.parameters.container = source
        admin.call("CreateParameters", request)
        fork = Fork(parameters=ref(**in_team(name, source)), fork=ref(**in_team(f"{name}, forked", target)))
        if not denied:
            assert chief.call("ForkParameters", fork).info.parameters.container == target
            return
        failure = chief.fail("ForkParameters", fork)
        assert failure.code is DENIED
        assert f"needs the role chief in the container {denied!r}" in failure.message
