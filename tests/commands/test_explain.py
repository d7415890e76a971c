"""`gradserve explain`: errors, requests and names."""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

import gradserve
from gradserve_protocol.troubleshooting import ENTRIES
from gradserve_server.commands.cli import cli
from gradserve_testing import LocalServer
from tests.commands.conftest import CommandLine
from tests.commands.test_completion import complete
from tests.commands.test_hostile_names import HOSTILE, SEEN, check
from tests.servers.connecting import no_server


def explained(*arguments: str) -> Result:
    """Explains without a server."""
    return CliRunner().invoke(cli, ("explain", *arguments), env={"GRADSERVE_ADDRESS": None})


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda each: each.code)
def test_every_code_is_explained_without_a_server(entry: Any) -> None:
    done = explained(entry.code.lower())
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith(f"{entry.code}, of {entry.error}\n")
    assert f"meaning: {entry.means}\n" in done.stdout
    assert ("\nnext: gradserve " in done.stdout) == bool(entry.commands)


@pytest.mark.parametrize(
    ("words", "code", "command"),
    [
        (["NotFoundError"], "GS_NOT_FOUND", "gradserve ls"),
        (["gradserve.errors.StaleGradientError"], "GS_STALE", "gradserve show KIND NAME"),
        (["no accumulator 'default/x'", "[GS_NO_SUCH_NAME]"], "GS_NO_SUCH_NAME", "gradserve ls"),
        (["NotFoundError: no tensor with the handle 'x'"], "GS_NO_TENSOR", "gradserve ls tensors"),
        (
            ["gradserve.AlreadyExistsError: accumulator 'default/a b' exists with another spec: ... [GS_OTHER_SPEC]"],
            "GS_OTHER_SPEC",
            "gradserve show accumulator 'a b'",
        ),
        (["UnavailableError: it is [GS_TLS] or [GS_NO_CONNECTION]"], "GS_NO_CONNECTION", "gradserve health"),
    ],
)
def test_errors_are_found_in_what_is_pasted(words: list[str], code: str, command: str) -> None:
    done = explained(*words)
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith(f"{code}, of ")
    assert done.stdout.endswith(f"\nnext: {command}\n")


def test_a_class_lists_its_finer_codes() -> None:
    assert "finer codes: GS_QUOTA" not in explained("ResourceExhaustedError").stdout
    assert "GS_MEMORY, GS_TOO_MANY" in explained("ResourceExhaustedError").stdout
    assert "finer codes" not in explained("GS_MEMORY").stdout


def test_a_code_that_does_not_exist_names_the_nearest() -> None:
    done = explained("GS_STAEL")
    assert done.exit_code == 2
    assert "no error has the code GS_STAEL; the nearest codes: GS_STALE" in done.stderr


@pytest.fixture(scope="module")
def waiting(client: gradserve.Client) -> Iterator[int]:
    """An accumulator in which one gradient of two waits; the id of the call that brought it."""
    acc = client.gradient_accumulator({"w": np.zeros(3, np.float32)}, shared_name="waits/net")
    with pytest.raises(gradserve.DeadlineExceededError) as raised:
        acc.push_pull({"w": np.ones(3, np.float32)}, num_required=2, timeout=0.0, worker_id="w0")
    assert raised.value.request_id is not None
    yield raised.value.request_id
    client.delete_accumulator("waits/net")


@pytest.mark.parametrize("given", ["waits/net", "default/waits/net"])
def test_a_name_is_looked_up(command_line: CommandLine, waiting: int, given: str) -> None:
    done = command_line.run("explain", given)
    assert done.exit_code == 0, done.output
    assert "accumulator default/waits/net: step 0, " in done.stdout
    assert "round: 1 gradients from w0; 0 calls wait" in done.stdout
    assert "DEADLINE_EXCEEDED from gradserve.v1.AccumulatorService.PushPull" in done.stdout
    assert done.stdout.endswith(f"next: gradserve show accumulator waits/net {command_line.address}\n")


def test_the_next_command_runs(command_line: CommandLine, waiting: int) -> None:
    command = command_line.json("explain", "waits/net")["next"]
    assert command_line.run(*command.split()[1:]).exit_code == 0


def test_a_request_is_looked_up(command_line: CommandLine, waiting: int) -> None:
    for given in (str(waiting), f"{waiting >> 64:032x}:{waiting % (1 << 64)}", f"wait on with request_id={waiting}"):
        done = command_line.run("explain", given)
        assert done.exit_code == 0, done.output
        assert "accumulator default/waits/net knows the request: what it brought is in the open round" in done.stdout


def test_a_line_with_all_of_these(command_line: CommandLine, waiting: int) -> None:
    line = f"accumulator 'default/waits/net' did not get it; request_id={waiting} [GS_ROUND_INCOMPLETE]"
    found = command_line.json("explain", line)
    assert found["entry"]["code"] == "GS_ROUND_INCOMPLETE"
    assert [(each["kind"], each["name"]) for each in found["things"]] == [("accumulator", "waits/net")]
    assert [each["outcome"] for each in found["requests"]] == ["accepted"]
    assert {each["code"] for each in found["errors"]} == {"DEADLINE_EXCEEDED"}
    assert found["next"] == f"gradserve show accumulator waits/net {command_line.address}"


def test_other_kinds(command_line: CommandLine, client: gradserve.Client) -> None:
    client.parameters({"w": np.zeros(3, np.float32)}, shared_name="explained", idle_lease=600.0)
    client.batch_norm(scope="explained")
    handle = client.put(np.zeros(3, np.float32))
    done = command_line.run("explain", "explained")
    assert "parameters default/explained: step 0, " in done.stdout
    assert "deleted after 10 min without use" in done.stdout
    assert "layer default/explained: " in done.stdout
    assert f"tensor {handle.handle}: float32 [3]" in command_line.run("explain", handle.handle).stdout


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("stale-gradiant", "nearest codes: GS_STALE"),
        ("waits", "similar names: default/waits/net"),
        ("5", "only that client can look it up"),
        (str(1 << 80), "no accumulator and no parameters on"),
    ],
)
def test_what_nobody_knows_is_an_error(command_line: CommandLine, waiting: int, given: str, problem: str) -> None:
    done = command_line.run("explain", given)
    assert done.exit_code == 1
    assert problem in done.stderr
    assert done.stdout.endswith(f"next: gradserve ls {command_line.address}\n")


def test_a_server_that_is_down(local: LocalServer) -> None:
    with no_server() as address:
        down = CommandLine(address)
        name = down.run("explain", "net")
        assert (name.exit_code, name.stdout) == (1, f"next: gradserve doctor {address}\n")
        assert "[GS_NO_CONNECTION]" in name.stderr
        code = down.run("explain", "GS_STALE")
        assert code.exit_code == 1
        assert code.stdout.startswith("GS_STALE, of ")
        assert "[GS_NO_CONNECTION]" in code.stderr


def test_hostile_names_do_nothing_to_the_terminal(command_line: CommandLine, client: gradserve.Client) -> None:
    client.conditional_accumulator("float32", (), shared_name=HOSTILE, container="hostile")
    for given in (HOSTILE, HOSTILE + "?", f"accumulator '{HOSTILE}' was deleted [GS_DELETED]"):
        done = command_line.run("explain", given, "--container", "hostile")
        check(done.output)
    assert f"accumulator hostile/{SEEN}" in command_line.run("explain", HOSTILE).stdout
    assert json.loads(command_line.run("explain", HOSTILE, "--json").stdout)["things"][0]["name"] == HOSTILE


def test_shells_complete_codes() -> None:
    assert complete("explain", "gs_no_s") == ["GS_NO_SUCH_NAME"]
