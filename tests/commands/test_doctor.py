"""`gradserve doctor`: situations, and what it says of them."""

import contextlib
import datetime
import json
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from pydantic import ByteSize

import gradserve
from gradserve_protocol.server_status import (
    AccumulatorStatus,
    ErrorStatus,
    MemoryStatus,
    ParametersStatus,
    RoundStatus,
    ServerStatus,
)
from gradserve_server.commands.cli import cli
from gradserve_server.commands.doctor.command import show
from gradserve_server.commands.doctor.server import (
    check_clock,
    check_disk,
    check_memory,
    check_training,
    check_transport,
    check_versions,
)
from gradserve_server.commands.doctor.subject import Finding, Subject, Verdict
from gradserve_server.config import LimitsConfig, ListenConfig, ServerConfig, StateConfig
from gradserve_server.security.authority import Authority
from gradserve_testing import LocalServer
from tests.commands.test_hostile_names import HOSTILE, check
from tests.security.serving import TOKENS, all_entries, serving
from tests.servers.certificates import HOSTS, Certificates, make_certificates
from tests.servers.connecting import no_server
from tests.servers.polling import PATIENCE_SECONDS
from tests.servers.runtime import NOT_WARMED_UP

_MIB = 1 << 20
_CHECKS = ["settings", "address", "connection", "tls", "health", "access"]
_CHECKS += ["versions", "transport", "speed", "clock", "memory", "disk", "training"]
"""The checks of a server, in their order."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("doctor")


@pytest.fixture(scope="module")
def silent() -> Iterator[str]:
    """The address of a program that says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"127.0.0.1:{listening.getsockname()[1]}"


@pytest.fixture(scope="module")
def servers(silent: str, local: LocalServer, folder: Path) -> Iterator[Mapping[str, str]]:
    """Servers in every state: their addresses by names."""
    made = make_certificates(folder)
    now = datetime.datetime.now(datetime.UTC)
    Authority.in_folder(folder / "soon").issue_server(HOSTS, 5)
    Authority.in_folder(folder / "later").issue_server(HOSTS, 30, now + datetime.timedelta(days=9))
    full = LimitsConfig(max_bytes=ByteSize(32 * _MIB))
    configs = {
        "tls": made.config(),
        "expired": made.config("expired"),
        "elsewhere": made.config("elsewhere"),
        "soon": Certificates(folder / "soon").config(),
        "later": Certificates(folder / "later").config(),
        "asking": made.config(asks_clients=True),
        "full": ServerConfig(listen=ListenConfig(http_listen="off"), runtime=NOT_WARMED_UP, limits=full),
    }
    with contextlib.ExitStack() as stack:
        found = {name: stack.enter_context(LocalServer(config)).address for name, config in configs.items()}
        found["guarded"] = stack.enter_context(serving(folder / "access.toml", all_entries())).address
        found["nobody"] = stack.enter_context(no_server())
        client = stack.enter_context(gradserve.connect(found["full"]))
        client.put(np.zeros(30 * _MIB, np.uint8))
        yield {"plain": local.address, "silent": silent, **found}


@dataclass(frozen=True)
class _Situation:
    """A situation of a user, and the answer of the check concerned."""

    arguments: str
    check: str
    verdict: str
    found: str
    cure: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)
    exit_code: int = 1


_SITUATIONS = {
    "nobody listens": _Situation(
        "{nobody}", "connection", "problem", "nobody listens at {nobody}", "gradserve serve --listen {nobody}"
    ),
    "no such host": _Situation(
        "no-such-host.invalid", "address", "problem", "no-such-host.invalid cannot be looked up", "correct ADDRESS"
    ),
    "no such socket": _Situation(
        "unix:{folder}/none", "address", "problem", "no socket {folder}/none", "serve --listen unix:{folder}/none"
    ),
    "no address": _Situation("ftp://x", "settings", "problem", "got 'ftp://x'", "correct ADDRESS", exit_code=2),
    "no authority": _Situation(
        "{tls} --tls-ca {folder}/none.pem", "settings", "problem", "none.pem", "GRADSERVE_TLS_CA", exit_code=2
    ),
    "no such transport": _Situation(
        "{plain}", "settings", "problem", "'pigeon'", "GRADSERVE_TRANSPORT", {"GRADSERVE_TRANSPORT": "pigeon"}, 2
    ),
    "a proxy": _Situation(
        "192.0.2.1 --timeout 1", "address", "warning", "https_proxy=http://{nobody}",
        "export no_grpc_proxy=192.0.2.1", {"https_proxy": "http://{nobody}"},
    ),
    "TLS": _Situation(
        "{tls} --tls-ca {folder}/ca.pem", "tls", "ok", "localhost, 127.0.0.1, ::1 is valid until", exit_code=0
    ),
    "TLS is missing": _Situation("{tls}", "tls", "problem", "the server uses TLS", "--tls-ca ca.pem"),
    "TLS is too much": _Situation("{plain} --tls", "tls", "problem", "does not use TLS", "leave out --tls"),
    "another authority": _Situation(
        "{tls} --tls-ca {folder}/strange/ca.pem", "tls", "problem", "signed by CN=", "ca.pem of the server's authority"
    ),
    "an expired certificate": _Situation(
        "{expired} --tls-ca {folder}/ca.pem", "tls", "problem", "has expired on", "certificates FOLDER --host 127.0.0.1"
    ),
    "a certificate of another host": _Situation(
        "{elsewhere} --tls-ca {folder}/ca.pem", "tls", "problem", "for elsewhere.example, not for 127.0.0.1",
        "one of these names",
    ),
    "no handshake": _Situation(
        "{silent} --tls --timeout 0.05", "tls", "problem", "no answer to the handshake", "--timeout SECONDS"
    ),
    "a certificate that expires soon": _Situation(
        "{soon} --tls-ca {folder}/soon/ca.pem", "tls", "warning", "is valid until", "gradserve certificates FOLDER",
        exit_code=0,
    ),
    "a clock that is behind": _Situation(
        "{later} --tls-ca {folder}/later/ca.pem", "tls", "problem", "certificate is valid from", "set the clock"
    ),
    "a certificate without its key": _Situation(
        "{tls} --tls-client-certificate x", "settings", "problem", "expected key as well", "--tls-client-key FILE",
        exit_code=2,
    ),
    "no certificate of a client": _Situation(
        "{asking} --tls-ca {folder}/ca.pem", "tls", "problem", "none is shown", "--tls-client-certificate FILE"
    ),
    "a stranger's certificate": _Situation(
        "{asking} --tls-ca {folder}/ca.pem --tls-client-certificate {folder}/stranger.pem "
        "--tls-client-key {folder}/stranger.key",
        "tls", "problem", "refuses the one that is shown", "--tls-client-certificate FILE",
    ),
    "no answer": _Situation(
        "{silent} --timeout 0.05", "health", "problem", "no answer within 0.05 s", "--timeout SECONDS"
    ),
    "no token": _Situation("{guarded}", "access", "problem", "no token was shown", "export GRADSERVE_TOKEN"),
    "an unknown token": _Situation(
        "{guarded}", "access", "problem", "is refused", "gradserve token NAME", {"GRADSERVE_TOKEN": "unknown"}
    ),
    "a worker where nothing exists": _Situation(
        "{guarded} --container team", "access", "warning", "the role worker may not create",
        "token NAME --role chief --container team", {"GRADSERVE_TOKEN": TOKENS["worker"]}, 0,
    ),
    "a chief": _Situation(
        "{guarded} --container team", "access", "ok", "may create what it needs (identity chief)", "",
        {"GRADSERVE_TOKEN": TOKENS["chief"]}, 0,
    ),
    "a role elsewhere": _Situation(
        "{guarded} --container team", "access", "problem", "'visitor' has no role there",
        "--role worker --container team", {"GRADSERVE_TOKEN": TOKENS["visitor"]},
    ),
    "a slower transport": _Situation(
        "{plain}", "transport", "warning", "tensors travel by grpc", "unset GRADSERVE_TRANSPORT",
        {"GRADSERVE_TRANSPORT": "grpc"}, 0,
    ),
    "near the limit": _Situation("{full}", "memory", "warning", "all tensors: 30.0 MiB of 32.0 MiB", "--max-bytes"),
    "no room": _Situation("{full}", "speed", "problem", "no room for 4.0 MiB", "--max-bytes"),
}  # fmt: skip


@pytest.mark.parametrize("situation", _SITUATIONS.values(), ids=_SITUATIONS)
def test_situation(situation: _Situation, servers: Mapping[str, str], folder: Path) -> None:
    def filled(text: str) -> str:
        return text.format(folder=folder, **servers)

    variables = {name: filled(value) for name, value in situation.variables.items()}
    arguments = filled(situation.arguments).split()
    done = CliRunner().invoke(cli, ["doctor", *arguments, "--json"], env=variables)
    assert done.exit_code == situation.exit_code, done.output
    checks = json.loads(done.stdout)["checks"]
    about = [each for each in checks if each["name"] == situation.check]
    (finding,) = [each for each in about if each["verdict"] == situation.verdict]
    assert filled(situation.found) in finding["found"]
    assert filled(situation.cure) in finding["cure"]
    assert all(each["cure"] for each in checks if each["verdict"] in ("warning", "problem"))


def test_lines_of_a_server_that_is_well(servers: Mapping[str, str], client: gradserve.Client) -> None:
    before = client.server_info().usage["num_handles"]
    done = CliRunner().invoke(cli, ["doctor"], env={"GRADSERVE_ADDRESS": servers["plain"]})
    assert done.exit_code == 0, done.output
    words = [line.split()[:3] for line in done.stdout.splitlines()]
    here = ["libraries", "machine", "extras", "kernels"]
    assert [word[2] for word in words if word[2] in here + _CHECKS] == here + _CHECKS, done.stdout
    measured = ("speed", "transport")  # a machine that is busy is slow, and may greet too late for a faster way
    others = [word[:2] for word in words if word[2] in _CHECKS and word[2] not in measured]
    assert others == [["+", "ok"]] * (len(_CHECKS) - len(measured)), done.stdout
    assert client.server_info().usage["num_handles"] == before


def test_checks_after_a_problem_are_skipped(servers: Mapping[str, str]) -> None:
    done = CliRunner().invoke(cli, ["doctor", servers["nobody"]])
    verdicts = {line.split()[2]: line.split()[1] for line in done.stdout.splitlines() if line[0] != " "}
    assert [verdicts[each] for each in _CHECKS] == ["ok", "ok", "problem"] + ["skipped"] * (len(_CHECKS) - 3)
    assert "not possible: connection has a problem" in done.stdout


def test_every_server_of_a_list_is_examined(servers: Mapping[str, str]) -> None:
    both = f"{servers['plain']},{servers['nobody']}"
    found = json.loads(CliRunner().invoke(cli, ["doctor", both, "--json"]).stdout)["checks"]
    problems = {(each["server"], each["name"]) for each in found if each["verdict"] == "problem"}
    assert problems == {(servers["plain"], "access"), (servers["nobody"], "connection")}
    assert any("it is in no cluster" in each["found"] for each in found)
    lines = CliRunner().invoke(cli, ["doctor", both]).stdout.splitlines()
    heads = [line for line in lines if line.startswith("server at")]
    assert heads == [f"server at {each}:" for each in both.split(",")]


@pytest.fixture
def subject(servers: Mapping[str, str]) -> Iterator[Subject]:
    with contextlib.ExitStack() as stack:
        files = dict.fromkeys(("tls_ca", "tls_client_certificate", "tls_client_key"))
        yield Subject(servers["plain"], 5.0, "", {"uses_tls": False, **files}, 0, 1, stack)


_WAITING: dict[str, Any] = {"name": "net", "container": "c", "num_waiting": 1, "num_required": 3, "missing": ("w2",)}
_OLD, _NEW = RoundStatus(began=100.0), RoundStatus(began=990.0)
_STATUSES = {
    "nothing": (ServerStatus(), "ok", "0 accumulators", ""),
    "a round has just begun": (
        ServerStatus(uptime=1000.0, accumulators=(AccumulatorStatus(**_WAITING, num_accumulated=2, rounds=(_NEW,)),)),
        "ok", "", "",
    ),
    "a round waits": (
        ServerStatus(uptime=1000.0, accumulators=(AccumulatorStatus(**_WAITING, num_accumulated=2, rounds=(_OLD,)),)),
        "warning", "accumulator net: 2 of 3 for 15 min; missing: w2", "gradserve show accumulator net --container c",
    ),
    "parameters wait": (
        ServerStatus(uptime=1000.0, parameters=(ParametersStatus(**_WAITING, num_updates=1, rounds=(_OLD,)),)),
        "warning", "parameters net: 1 of 3 for 15 min; missing: w2", "gradserve show parameters net --container c",
    ),
    "most gradients are late": (
        ServerStatus(accumulators=(AccumulatorStatus("c", "net", accepted=2, stale=3),)),
        "warning", "3 of 5 came too late", "show accumulator net",
    ),
    "weights differ": (
        ServerStatus(accumulators=(AccumulatorStatus("c", "net", different={"w1": 4}),)),
        "problem", "weights differ from those of most at w1", "start these workers again",
    ),
    "a worker may not create": (
        ServerStatus(errors=(ErrorStatus("a.CreateAccumulator", "PERMISSION_DENIED", "needs the role chief", 2),)),
        "warning", "refused, 2 in all: needs the role chief", "--role chief",
    ),
    "this command was refused": (
        ServerStatus(errors=(ErrorStatus("a.DeleteAccumulator", "PERMISSION_DENIED", "needs the role chief", 2),)),
        "ok", "", "",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("status", "verdict", "found", "cure"), _STATUSES.values(), ids=_STATUSES)
def test_what_a_status_says(subject: Subject, status: ServerStatus, verdict: str, found: str, cure: str) -> None:
    vars(subject)["status"] = status
    ((given, text, way),) = check_training(subject)
    assert given == verdict
    assert found in text
    assert cure in way


def test_what_a_description_says(subject: Subject) -> None:
    info = subject.info
    vars(subject)["status"] = ServerStatus(memory=(MemoryStatus("bookkeeping", 95, 100),))
    vars(subject)["info"] = replace(
        info, version="9.9", limits={**info.limits, "max_layers": 10}, usage={**info.usage, "num_layers": 9}
    )
    assert [each[0] for each in check_versions(subject)] == [Verdict.WARNING]
    texts = [text for _, text, _ in check_memory(subject)]
    assert texts == ["bookkeeping: 95 B of 100 B in use", "layers: 9 of 10 in use"]


@pytest.mark.parametrize(
    ("seconds", "verdict", "found"),
    [
        (None, "ok", "too old to tell what its clock says"),
        (0.0, "ok", "the server's clock is "),
        (3600.0, "warning", "the server's clock is 60 min ahead, give or take "),
        (-3600.0, "warning", "the server's clock is 60 min behind, give or take "),
    ],
)
def test_clocks_are_compared(
    subject: Subject, monkeypatch: pytest.MonkeyPatch, seconds: float | None, verdict: str, found: str
) -> None:
    ask = subject.client.server_info
    monkeypatch.setattr(
        subject.client,
        "server_info",
        lambda: replace(info := ask(), time=0.0 if seconds is None else info.time + seconds),
    )
    ((given, text, _),) = check_clock(subject)
    assert given == verdict
    assert found.replace("60 min", "1 h") in text


def test_a_server_says_what_its_clock_and_its_disk_have(tmp_path: Path) -> None:
    config = ServerConfig(runtime=NOT_WARMED_UP, state=StateConfig(state_dir=str(tmp_path / "state")))
    with LocalServer(config) as local, gradserve.connect(local.address) as client:
        info = client.server_info()
        assert abs(info.time - time.time()) < PATIENCE_SECONDS
        assert info.state_disk["total_bytes"] == shutil.disk_usage(tmp_path).total
        assert 0 < info.state_disk["free_bytes"] <= info.state_disk["total_bytes"]
        assert "state directory: " in CliRunner().invoke(cli, ["info", local.address]).stdout


@pytest.mark.parametrize(
    ("free", "verdict", "found"),
    [
        (None, "ok", "the server keeps nothing on a disk"),
        (99, "warning", "state directory: 99 B of 1000 B free; when it is full, gradients and rounds are refused"),
        (100, "ok", "state directory: 100 B of 1000 B free"),
    ],
)
def test_disks_need_room(subject: Subject, free: int | None, verdict: str, found: str) -> None:
    disk = {} if free is None else {"free_bytes": free, "total_bytes": 1000}
    vars(subject)["info"] = replace(subject.info, state_disk=disk)
    ((given, text, _),) = check_disk(subject)
    assert given == verdict
    assert found in text


_WHY = "bulk: the server listens at 127.0.0.1:1, which h does not lead to"
_REASONS = {
    "shared_memory: the server is on another machine": "",
    f"shared_memory: the server is on another machine; {_WHY}": "--bulk-listen",
    "shared_memory: the server has no socket for it": "--shared-memory-socket auto",
    "shared_memory: no connection to unix:/a: Permission denied": "a volume",
    "bulk: no connection to h:1: no answer in time": "firewalls",
}


@pytest.mark.parametrize(("reason", "cure"), _REASONS.items(), ids=_REASONS)
def test_why_not_faster(subject: Subject, monkeypatch: pytest.MonkeyPatch, reason: str, cure: str) -> None:
    described = replace(subject.info, transport=gradserve.TransportInfo("grpc", reason))
    monkeypatch.setattr(subject.client, "server_info", lambda: described)
    ((verdict, _, given),) = check_transport(subject)
    assert (verdict == Verdict.OK) is (cure == "")
    assert cure in given


def test_texts_of_servers_do_nothing_to_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    show(Finding("access", Verdict.PROBLEM, HOSTILE, HOSTILE))
    text = capsys.readouterr().out
    assert text.count("\n") == 2
    check(text)


def test_an_unexpected_error_is_a_finding(servers: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_self: gradserve.Client, **_options: object) -> None:
        raise ZeroDivisionError("never")

    monkeypatch.setattr(gradserve.Client, "server_status", fail)
    done = CliRunner().invoke(cli, ["doctor", servers["plain"]])
    assert done.exit_code == 1
    assert "training    the check has failed: ZeroDivisionError: never" in done.stdout
