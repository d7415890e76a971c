"""Names and ids that would do something to the terminal of whoever looks at a server."""

import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from textual.widgets import DataTable, Static

import gradserve.aio
from gradserve_server import commands
from gradserve_server.commands.servers import Answer
from gradserve_server.commands.top.app import TopApp
from gradserve_server.commands.top.picture import Picture
from gradserve_server.config import ListenConfig, ServerConfig, StateConfig
from gradserve_server.observe.logs import JsonFormatter, TextFormatter
from gradserve_testing import LocalServer
from tests.commands.conftest import CommandLine
from tests.commands.test_completion import complete
from tests.commands.test_top import shows
from tests.servers.runtime import NOT_WARMED_UP

HOSTILE = "\x1b]52;c;cm0=\x07\x9b2J\x7f\u202e\u200b\u2028\nforged  row\r[bold]"
SEEN = r"\x1b]52;c;cm0=\x07\x9b2J\x7f\u202e\u200b\u2028\nforged  row\r[bold]"


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state directory with such names; returns it, while no server uses it."""
    folder = tmp_path_factory.mktemp("hostile") / "state"
    with serving(folder) as local, gradserve.connect(local.address) as client:
        acc = client.conditional_accumulator(
            "float32", (), shared_name=HOSTILE, container=HOSTILE, durability="gradient"
        )
        for worker in (HOSTILE, "honest"):
            acc.apply_grad(1.0, local_step=0, worker_id=worker)
        acc.take_grad(2)
        acc.apply_grad(1.0, local_step=0, worker_id=HOSTILE)  # too late
        acc.apply_grad(1.0, local_step=1, worker_id="honest")
        acc.take_grad(1)
        acc.apply_grad(1.0, local_step=2, worker_id=HOSTILE)
        client.batch_norm(scope=HOSTILE, container=HOSTILE)
    return folder


def serving(state_dir: Path) -> LocalServer:
    listen = ListenConfig(http_listen="off")
    return LocalServer(ServerConfig(listen=listen, runtime=NOT_WARMED_UP, state=StateConfig(state_dir=str(state_dir))))


@pytest.fixture(scope="module")
def looked_at(hostile: Path) -> Iterator[CommandLine]:
    with serving(hostile) as local:
        yield CommandLine(local.address)


def check(text: str) -> None:
    assert all(each.isprintable() or each == "\n" for each in text), repr(text)
    assert not any(line.startswith("forged") for line in text.split("\n")), text


def test_the_state_directory_is_listed_with_them(hostile: Path) -> None:
    for arguments in (
        ["check", str(hostile)],
        ["export", str(hostile), HOSTILE, "average.npz", "--container", HOSTILE + "?"],
    ):
        done = CommandLine("").run("state", *arguments)
        check(done.output)
        assert SEEN.partition(r"\n")[0] in done.output


@pytest.mark.parametrize(
    "command",
    [
        ["ls"],
        ["ls", "layers"],
        ["show", "accumulator", HOSTILE, "--container", HOSTILE],
        ["show", "layer", HOSTILE, "--container", HOSTILE],
        ["info"],
        ["health"],
        ["show", "accumulator", HOSTILE + "?", "--container", HOSTILE],
        ["rm", "layer", HOSTILE + "?", "--container", HOSTILE, "--yes"],
        ["rm", "layer", HOSTILE, "--container", HOSTILE],
    ],
    ids=lambda command: " ".join(command[:2]),
)
def test_commands_show_them_and_do_not_write_them(looked_at: CommandLine, command: list[str]) -> None:
    done = looked_at.run(*command, answer="n\n")
    check(done.stdout)
    check(done.stderr)
    if command[0] not in ("info", "health"):
        assert SEEN.partition(r"\n")[0] in done.output


def test_json_has_them_in_escapes(looked_at: CommandLine) -> None:
    done = looked_at.run("ls", "--json")
    check(done.stdout)
    assert json.loads(done.stdout)["accumulators"][0]["name"] == HOSTILE


def test_an_address_is_shown_as_well() -> None:
    done = CommandLine("localhost:1\x1b[2J").run("health")
    assert done.exit_code == 2
    check(done.stderr)


async def test_top_shows_them(looked_at: CommandLine, hostile: Path) -> None:
    async with gradserve.aio.connect(looked_at.address) as client:

        async def take_picture(part: str, order: str) -> Picture:
            status = await client.server_status(name_contains=part, order=order)
            return Answer(0, looked_at.address, status), Answer(1, HOSTILE, problem=HOSTILE)

        app = TopApp("[red]" + HOSTILE, take_picture, 3600.0, num_servers=2)
        async with app.run_test(size=(160, 50)) as pilot:
            table = app.query_one(DataTable)
            await shows(app, pilot, lambda: table.row_count > 0)
            texts = [str(each.render()) for each in app.query(Static)]
            texts += [str(cell) for row in range(table.row_count) for cell in table.get_row_at(row)]
    check("\n".join(texts))
    assert sum(SEEN in each for each in texts) > 4
    assert any(each.startswith("[red]") for each in texts)


def test_shells_complete_words_alone(
    client: gradserve.Client, monkeypatch: pytest.MonkeyPatch, local: LocalServer
) -> None:
    monkeypatch.setenv("GRADSERVE_ADDRESS", local.address)
    offered = ["m\u00fcller/weights-1.w:0", "plain"]
    for name in (
        *offered,
        HOSTILE,
        "x;touch y",
        "$(id)",
        "`id`",
        "--yes",
        "-y",
        "a b",
        "a*",
        "a'b",
        "~root",
        "a\\b",
        "#x",
    ):
        client.conditional_accumulator("float32", (), shared_name=name, container="words")
    assert sorted(complete("show --container words accumulator")) == sorted(offered)


def test_commands_print_in_one_way() -> None:
    """The other commands that call click.echo print texts of their own, or with what makes them visible."""
    folder = Path(commands.__file__).parent
    found = {str(each.relative_to(folder)) for each in folder.rglob("*.py") if "click.echo(" in each.read_text()}
    assert found == {"bench.py", "cli.py", "run/command.py", "wording.py"}


def test_lines_of_the_log_are_the_servers_own() -> None:
    try:
        {"": ""}[HOSTILE]
    except KeyError:
        failure = sys.exc_info()
    record = logging.LogRecord("gradserve_server.x", logging.INFO, __file__, 1, "of %s", (HOSTILE,), failure)
    lines = TextFormatter().format(record)
    check(lines)
    assert all(line.startswith("  ") for line in lines.split("\n")[1:])
    assert r"\x1b]52" in lines
    line = JsonFormatter().format(record)
    assert line.isascii()
    check(line)
    assert json.loads(line)["message"] == f"of {HOSTILE}"
