"""The HTTP port: who may read what, and what it answers."""

import json
import logging
import math
import socket
import ssl
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest

import gradserve
from gradserve_server.config import ListenConfig, RuntimeConfig, ServerConfig
from gradserve_testing import LocalServer
from tests.observe.http_client import connect, get, url_of
from tests.security.serving import TOKENS, all_entries, entry, serving
from tests.servers.certificates import make_certificates
from tests.servers.command_line import run_cli
from tests.servers.polling import PATIENCE_SECONDS
from tests.servers.runtime import NOT_WARMED_UP

_OVERSEER = "gradserve_" + "o" * 43


@pytest.fixture(scope="module")
def local() -> Iterator[LocalServer]:
    listen = ListenConfig(http_host=("metrics.example.com",))
    with LocalServer(ServerConfig(listen=listen, runtime=NOT_WARMED_UP)) as server:
        yield server


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    text = all_entries() + entry("overseer", {"*": "worker"}, _OVERSEER)
    with serving(tmp_path_factory.mktemp("access") / "access.toml", text) as server:
        for container in ("team", "elsewhere"):
            with gradserve.connect(server.address, token=TOKENS["admin"]) as client:
                client.conditional_accumulator("float32", (2,), shared_name="w", container=container)
                client.parameters({"w": np.zeros(2, np.float32)}, shared_name="w", container=container)
        yield server


def test_the_port_is_on_this_machine_alone_by_default(local: LocalServer) -> None:
    assert urlsplit(url_of(local)).hostname == "127.0.0.1"
    with gradserve.connect(local.address) as client:
        assert client.server_info().http_url == url_of(local)
    assert f"status page: {url_of(local)}\n" in run_cli("info", local.address).stdout


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "CONNECT", "TRACE", "NONSENSE"])
@pytest.mark.parametrize("path", ["/", "/metrics", "/api/status", "/api/what-if"])
def test_nothing_can_be_changed(local: LocalServer, method: str, path: str) -> None:
    answer = get(url_of(local), path, method=method)
    assert answer.status in (400, 405)
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:50080", 200),
        ("127.0.0.1:1", 200),
        ("[::1]:50080", 200),
        ("192.0.2.7", 200),
        ("metrics.example.com:50080", 200),
        ("Metrics.Example.com.", 200),
        ("evil.example.com", 421),
        ("localhost.evil.example.com", 421),
        ("127.0.0.1.evil.example.com", 421),
        ("evil.example.com:127.0.0.1", 421),
        ("[::1].evil.example.com", 421),
        ("", 421),
        ("a:b:c", 421),
    ],
)
@pytest.mark.parametrize("path", ["/metrics", "/api/status", "/healthz", "/nothing"])
def test_pages_of_other_sites_cannot_reach_it_by_a_name_of_theirs(
    local: LocalServer, path: str, host: str, status: int
) -> None:
    answer = get(url_of(local), path, Host=host)
    assert answer.status == (404 if path == "/nothing" and status == 200 else status), answer.text


@pytest.mark.parametrize(
    "path", ["/metrics", "/api/status", "/api/what-if", "/healthz", "/nothing", "/api/status?order=x"]
)
def test_no_other_site_can_read_or_frame_an_answer(local: LocalServer, path: str) -> None:
    headers = get(url_of(local), path, Origin="http://evil.example.com").headers
    assert not [name for name in headers if name.startswith("access-control")]
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert headers["cross-origin-resource-policy"] == "same-origin"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cache-control"] == "no-store"
    assert headers["server"] == "gradserve"


@pytest.mark.parametrize("path", ["/..%2f..%2fetc/passwd", "/../config.py", "/%2e%2e/port.py", "/a/..", "/a/b"])
def test_only_files_of_the_page_are_there(local: LocalServer, path: str) -> None:
    assert get(url_of(local), path).status == 404


def test_metrics_that_are_no_numbers_of_json_are_texts(local: LocalServer) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    with gradserve.connect(local.address) as client:
        parameters = client.parameters({"w": np.ones(2)}, shared_name="not finite")
        parameters.push({"w": np.ones(2)}, 0, metrics={"loss": math.nan, "low": -math.inf, "accuracy": 0.5})
        parameters.report({"loss": math.inf}, 0)
        text = get(url_of(local), "/api/status?name_contains=not%20finite").text
        (described,) = json.loads(text, parse_constant=refuse)["parameters"]
        assert described["rounds"][0]["metrics"] == {"loss": "NaN", "low": "-Infinity", "accuracy": 0.5}
        assert described["evaluations"] == [{"step": 0, "metrics": {"loss": "Infinity"}}]
        (found,) = client.server_status(name_contains="not finite").parameters
        assert found.evaluations[0].metrics == {"loss": math.inf}
        assert math.isnan(found.rounds[0].metrics["loss"])
        parameters.delete()


def test_rounds_are_replayed(local: LocalServer) -> None:
    with gradserve.connect(local.address) as client:
        net = client.conditional_accumulator("float32", (), shared_name="what if")
        held = client.parameters({"w": np.zeros(2)}, shared_name="what if", num_required=2)
        for step in range(6):
            for worker in ("a", "b"):
                net.apply_grad(np.float32(1), local_step=step, worker_id=worker)
                held.push({"w": np.ones(2)}, step, worker_id=worker)
            net.take_grad(2)
            held.wait(step + 1, timeout=PATIENCE_SECONDS)
        found = get(url_of(local), "/api/what-if?name_contains=what%20if").json
        for kind, num_graces in (("accumulators", 1), ("parameters", 2)):
            (one,) = found[kind]
            assert (one["container"], one["name"], one["what_if"]["num_workers"]) == ("default", "what if", 2)
            assert {each["num_required"] for each in one["what_if"]["alternatives"]} == {1}
            assert len({each["grace"] for each in one["what_if"]["alternatives"]}) == num_graces
        held.delete()
        net.delete()
        assert get(url_of(local), "/api/what-if?name_contains=what%20if").json == {"accumulators": [], "parameters": []}


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("order=x", "order: expected one of latest, name, rate, waiting, bytes, got 'x'"),
        ("max_rounds=-1", "max_rounds: expected a whole number, got '-1'"),
        ("max_rounds=21", "max_rounds: expected 1 to 20, got 21"),
        ("max_accumulators=1001", "expected 1 to 1000, got 1001"),
        ("max_workers=0", "expected 1 to 1000, got 0"),
        ("max_workers=9" + 30 * "9", "max_workers: expected a whole number"),
        ("colour=red", "expected container, name_contains, max_accumulators"),
        ("name_contains=" + 5000 * "x", "name_contains"),
    ],
)
@pytest.mark.parametrize("path", ["/api/status", "/api/events", "/api/what-if"])
def test_a_query_that_makes_no_sense_says_so(local: LocalServer, path: str, query: str, message: str) -> None:
    answer = get(url_of(local), f"{path}?{query}")
    assert answer.status == 400
    assert message in answer.json["error"]


def test_the_status_is_that_of_the_call(local: LocalServer) -> None:
    with gradserve.connect(local.address) as client:
        acc = client.conditional_accumulator("float32", (2,), shared_name="status/of the call")
        acc.apply_grad(np.ones(2, np.float32), worker_id="a")
        acc.take_grad(1)
        by_call = client.server_status(name_contains="OF THE CALL")
    by_http = get(url_of(local), "/api/status?name_contains=OF%20THE%20CALL").json
    (from_call,), (from_http,) = by_call.accumulators, by_http["accumulators"]
    assert from_http["name"] == from_call.name == "status/of the call"
    assert from_http["rounds"][0]["arrivals"] == [{"worker_id": "a", "after": 0.0, "stale": False, "staleness": 0}]
    assert from_call.rounds[0].arrivals[0].worker_id == "a"
    assert by_http["incarnation"] == by_call.incarnation


def test_events_follow_one_another(local: LocalServer) -> None:
    with closing(connect(url_of(local))) as connection:
        connection.request("GET", "/api/events?max_rounds=1")
        response = connection.getresponse()
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        pictures = []
        for _ in range(2):
            pictures.append(json.loads(response.readline().removeprefix(b"data: ")))
            assert response.readline() == b"\n"
    assert pictures[0]["uptime"] < pictures[1]["uptime"]


def test_connections_beyond_the_limit_end_and_the_port_goes_on(local: LocalServer) -> None:
    place = urlsplit(url_of(local))
    assert place.hostname is not None
    assert place.port is not None
    silent = [socket.create_connection((place.hostname, place.port)) for _ in range(160)]
    try:
        silent[0].settimeout(PATIENCE_SECONDS)
        assert silent[0].recv(1) == b"", "the oldest makes way"
    finally:
        for each in silent:
            each.close()
    assert get(url_of(local), "/healthz").status == 200


@pytest.mark.parametrize(
    ("path", "name", "status"),
    [
        ("/api/status", "", 401),
        ("/api/status", "unknown", 401),
        ("/api/events", "", 401),
        ("/metrics", "", 401),
        ("/metrics", "worker", 403),
        ("/metrics", "visitor", 403),
        ("/metrics", "overseer", 200),
        ("/metrics", "admin", 200),
        ("/api/status", "worker", 200),
        ("/api/status?container=team", "worker", 200),
        ("/api/status?container=elsewhere", "worker", 403),
        ("/api/what-if", "", 401),
        ("/api/what-if?container=team", "worker", 200),
        ("/api/what-if?container=elsewhere", "worker", 403),
        ("/api/logs", "", 401),
        ("/api/logs", "unknown", 401),
        ("/api/logs", "worker", 403),
        ("/api/logs", "overseer", 403),
        ("/api/logs", "admin", 200),
        ("/healthz", "", 200),
        ("/nothing", "", 404),
    ],
)
def test_with_tokens_each_sees_what_is_its_own(guarded: LocalServer, path: str, name: str, status: int) -> None:
    headers = {}
    if name:
        headers["Authorization"] = f"Bearer {({**TOKENS, 'overseer': _OVERSEER}).get(name, 'gradserve_no')}"
    answer = get(url_of(guarded), path, tls=None, **headers)
    assert answer.status == status, answer.text
    assert ("www-authenticate" in answer.headers) == (status == 401)
    if path == "/api/status" and status == 200:
        assert [each["container"] for each in answer.json["accumulators"]] == ["team"]
        assert ([each["container"] for each in answer.json["parameters"]], answer.json["num_parameters"]) == (
            ["team"],
            1,
        )
        assert answer.json["errors"] == []


def test_calls_get_the_log_as_the_port_does(guarded: LocalServer) -> None:
    for token in (TOKENS["worker"], _OVERSEER):
        refused = pytest.raises(gradserve.PermissionDeniedError, match=r"admin in all containers.* \[GS_ROLE\]")
        with gradserve.connect(guarded.address, token=token) as client, refused:
            client.server_log()
    logging.getLogger("gradserve_server.x").warning("one for calls")
    with gradserve.connect(guarded.address, token=TOKENS["admin"]) as client:
        (line,) = client.server_log(contains="ONE FOR CALLS").lines
        assert (line.level, line.logger) == ("WARNING", "gradserve_server.x")
        assert client.server_log(after=line.number, contains="one for calls").lines == ()


def test_the_log_is_found_by_level_and_text(local: LocalServer) -> None:
    log = logging.getLogger("gradserve_server.test_of_the_log")
    log.setLevel(logging.DEBUG)
    for level in ("debug", "info", "warning"):
        getattr(log, level)("the <b>%s</b> line\nof two", level)
    log.error("failed", exc_info=ValueError("a reason"))
    elsewhere = logging.getLogger("another program")
    elsewhere.error("not of the server: test_of_the_log")

    def found(query: str) -> list[tuple[str, str]]:
        lines = get(url_of(local), f"/api/logs?{query}").json["lines"]
        return [(each["level"], each["message"]) for each in lines if each["logger"] == log.name]

    lines = [(name.upper(), f"the <b>{name}</b> line\nof two") for name in ("debug", "info", "warning")]
    assert found("contains=TEST_OF_THE_LOG") == [*lines, ("ERROR", "failed\nValueError: a reason")]
    assert found("contains=LINE&level=info") == lines[1:]
    assert found("contains=line&max_lines=1") == lines[2:]
    assert not any("another program" in each["logger"] for each in get(url_of(local), "/api/logs").json["lines"])


def test_lines_about_a_call_have_its_request_id(local: LocalServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "gradserve_server.calls")
    with gradserve.connect(local.address) as client, pytest.raises(gradserve.NotFoundError):
        client.get(gradserve.TensorHandle("no such tensor of the log", np.dtype(np.float32), (1,)))
    lines = get(url_of(local), "/api/logs?contains=NOT_FOUND").json["lines"]
    assert lines
    request_id = lines[-1]["request_id"]
    assert request_id
    found = get(url_of(local), f"/api/logs?contains={request_id}").json["lines"]
    assert {each["request_id"] for each in found} == {request_id}


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("max_lines=0", "max_lines: expected 1 to 1000, got 0"),
        ("max_lines=1001", "max_lines: expected 1 to 1000"),
        ("after=x", "after: expected a whole number, got 'x'"),
        ("level=loud", "level: expected one of debug, info, warning, error, got 'loud'"),
        ("contain=x", "expected max_lines, level, contains, after in the query, got 'contain'"),
    ],
)
def test_a_wish_for_the_log_that_cannot_be(local: LocalServer, query: str, message: str) -> None:
    answer = get(url_of(local), f"/api/logs?{query}")
    assert answer.status == 400
    assert message in answer.json["error"]


def test_the_port_is_encrypted_where_the_server_is(tmp_path: Path) -> None:
    certificates = make_certificates(tmp_path)
    with LocalServer(certificates.config()) as local:
        url = url_of(local)
        assert url.startswith("https://127.0.0.1:")
        context = ssl.create_default_context(cafile=str(certificates.ca))
        assert get(url, "/healthz", tls=context).status == 200


def test_an_address_that_cannot_be_had_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run_cli("serve", "--listen", "127.0.0.1:0", "--http-listen", f"127.0.0.1:{port}")
    assert done.returncode == 1
    assert done.stderr.endswith(f"Error: cannot listen for HTTP on 127.0.0.1:{port}: address already in use\n")


def test_without_a_port_nothing_listens() -> None:
    listen = ListenConfig(http_listen="off")
    with LocalServer(ServerConfig(listen=listen, runtime=RuntimeConfig(warm_up=False))) as local:
        assert url_of(local) == ""


def test_a_client_of_grpc_gets_an_answer_and_leaves_no_word_in_the_log(
    local: LocalServer, caplog: pytest.LogCaptureFixture
) -> None:
    place = urlsplit(url_of(local)).netloc
    with gradserve.connect(place, timeout=1.0) as client, pytest.raises(gradserve.GradserveError):
        client.server_info()
    assert get(url_of(local), "/api/status").status == 200
    assert [each for each in caplog.records if each.levelno >= logging.WARNING] == []


def test_kernels_that_nobody_prepares_are_not_awaited(local: LocalServer) -> None:
    """With --warm-up false, the first op prepares them."""
    assert not local.server.runner.is_prepared
    with gradserve.connect(local.address) as client:
        assert client.server_status().ops_prepared
        assert not client.server_info().ops_prepared
