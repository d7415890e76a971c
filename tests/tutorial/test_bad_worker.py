"""The page about a bad worker, typed as it is printed: each trouble is named by the commands that the page gives."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner

from gradserve.testing import ServerThread
from gradserve_server.commands.cli import cli
from tests.project.blocks.reading import read_blocks
from tests.project.blocks.shell import Command, commands_in
from tests.servers.polling import PATIENCE_SECONDS, eventually
from tests.servers.processes import ended

ROOT = Path(__file__).parents[2]
PAGE = "docs/howto/find_a_bad_worker.md"
TEXT = (ROOT / PAGE).read_text()
TOP, WHAT_IF, EXPLAIN, SHOW, EXPLAIN_ERROR, *PROGRAMS = [
    command for block in read_blocks(PAGE) if block.language == "console" for command in commands_in(block)
]
MISSING = "  missing from the round before: worker-2"


@pytest.fixture
def server() -> Iterator[ServerThread]:
    with ServerThread() as started:
        yield started


@contextmanager
def workers(server: ServerThread, folder: Path, trouble: str) -> Iterator["subprocess.Popen[bytes]"]:
    """Runs the three programs of the page, the last of them with some trouble; yields that one."""
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with ExitStack() as stack:
        for number, program in enumerate(PROGRAMS):
            assert program.words[0] == "python"
            words = [{"localhost:50051": server.address, "slow": trouble}.get(word, word) for word in program.words[1:]]
            log = stack.enter_context((folder / f"log-{number}").open("wb"))
            process = subprocess.Popen([sys.executable, *words], cwd=ROOT, env=variables, stdout=log, stderr=log)
            stack.enter_context(ended(process))
            if number == 1:  # the third joins a run that has begun, so it is the one that does not fit
                eventually(lambda: "2 of 3" in run(server, EXPLAIN))
        yield process


def run(server: ServerThread, command: Command) -> str:
    """Returns what a command of the page prints, as if it were asked of the server at localhost:50051."""
    words = [word.replace("localhost:50051", server.address) for word in command.words[1:]]
    result = CliRunner().invoke(cli, words, env={"GRADSERVE_ADDRESS": server.address})
    return result.output.replace(server.address, "localhost:50051")


def last_line(folder: Path) -> str:
    return (folder / "log-2").read_text().splitlines()[-1]


def test_the_slow_worker_is_the_first_in_top(server: ServerThread, tmp_path: Path) -> None:
    with workers(server, tmp_path, "slow"):
        what_if = eventually(lambda: run(server, WHAT_IF), lambda printed: "with 2 of 3 gradients" in printed)
        top = run(server, TOP)
    assert re.search(r"^WORKER .*\nworker-2 ", top, re.MULTILINE), top
    for printed, on_page in ((top, TOP.output), (what_if, WHAT_IF.output)):
        assert headings(printed) == headings(on_page)


def headings(table: str) -> list[str]:
    """Returns the lines of capitals of what a command prints, without the widths of their columns."""
    return [" ".join(line.split()) for line in table.splitlines() if re.match(r"[A-Z]{4}", line)]


def test_a_worker_with_another_optimizer_does_not_get_in(server: ServerThread, tmp_path: Path) -> None:
    with workers(server, tmp_path, "rate") as worker:
        assert worker.wait(PATIENCE_SECONDS) != 0
        explained = run(server, EXPLAIN)
    assert last_line(tmp_path) in TEXT.splitlines()
    lines = [re.sub(r"worker-[01], worker-[01]", "worker-0, worker-1", line) for line in explained.splitlines()]
    assert lines == EXPLAIN.output.splitlines()


def test_a_gradient_with_a_nan_is_refused_and_its_worker_is_missing(server: ServerThread, tmp_path: Path) -> None:
    with workers(server, tmp_path, "nan") as worker:
        assert worker.wait(PATIENCE_SECONDS) != 0
        shown = eventually(lambda: run(server, SHOW), lambda printed: MISSING in printed.splitlines())
        explained = run(server, EXPLAIN_ERROR)
    printed = SHOW.output.splitlines()
    assert shown.splitlines()[0] == printed[0]
    assert shown.splitlines()[3] == printed[3] == MISSING
    assert ", 1 refused; " in shown
    (error,) = re.findall(r"expected finite values .*", EXPLAIN_ERROR.output)
    assert error in explained
    assert error in last_line(tmp_path)
