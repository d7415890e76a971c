"""Both parts of the tutorial, typed as they are printed, on two hosts. Only the installation is that of the tests."""

import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.site.hidden import without_comments
from tests.servers.polling import PATIENCE_SECONDS, eventually
from tests.tutorial.hosts import Host, can_make_hosts, two_hosts

TEXT = "\n".join(Path("docs", page).read_text() for page in ("tutorial.md", "tutorial_two_hosts.md"))
LOITERING = 'while name == "ben" and version.step >= 50 and not __import__("os").path.exists("go"): time.sleep(0.01)'
"""Ben does not come to the end of his training before he is interrupted, however long that takes."""
_BLOCK = re.compile(r"^```(console|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Printed:
    """The blocks of the tutorial, each of which is used once, in their order."""

    def __init__(self) -> None:
        self._blocks = _BLOCK.findall(without_comments(TEXT))
        self._next = 0

    def program(self) -> str:
        """Returns the next block, which is a program."""
        kind, text = self._take()
        assert kind == "python"
        return text

    def commands(self) -> str:
        """Returns what is typed in the next block."""
        kind, text = self._take()
        assert kind == "console"
        lines = text.splitlines()
        typed = [
            line.removeprefix("$ ")
            for number, line in enumerate(lines)
            if line.startswith("$ ") or (number and lines[number - 1].endswith("\\"))
        ]
        return "\n".join(typed)

    @property
    def is_over(self) -> bool:
        """Whether all have been used."""
        return self._next == len(self._blocks)

    def _take(self) -> tuple[str, str]:
        self._next += 1
        kind, text = self._blocks[self._next - 1]
        return kind, text


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[Host, Host]]:
    if not can_make_hosts():
        pytest.skip("needs network namespaces: root, and ip of iproute2")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    kept = {name: os.environ[name] for name in ("HOME", "PYTHONPATH") if name in os.environ}
    with two_hosts(tmp_path, {"PATH": path, "PYTHONUNBUFFERED": "1", **kept}) as made:
        yield made


def test_the_tutorial_does_what_it_says(hosts: tuple[Host, Host]) -> None:
    first, second = hosts
    printed = Printed()
    assert "pip install '.[server]'" in printed.commands()

    server = first.begin(printed.commands())
    eventually(lambda: "serving on 127.0.0.1:50051" in server.output)
    assert first.run(printed.commands()) == "localhost:50051: SERVING\n"

    worker, program = first.folder / "worker.py", printed.program()
    worker.write_text(program.replace("time.sleep(0.05)", "time.sleep(0.01)"))
    start_anna, start_ben = printed.commands(), printed.commands()
    anna, ben = first.begin(start_anna), first.begin(start_ben)
    looking = printed.commands().replace("gradserve top", "gradserve top --json")
    eventually(lambda: "rounds by the reason of their end" in first.run("gradserve show parameters line || true"))
    assert "line" in first.run(looking)
    anna.wait()
    ben.wait()
    lines = "\n".join(each.output.splitlines()[-1] for each in (anna, ben))
    assert lines in TEXT, lines

    assert first.run(printed.commands()) == "deleted line\n"
    worker.write_text(program.replace("time.sleep(0.05)", LOITERING))
    anna, ben = first.begin(start_anna), first.begin(start_ben)
    eventually(lambda: "rounds by the reason of their end" in first.run("gradserve show parameters line || true"))
    ben.interrupt()
    eventually(lambda: "missing: ben" in first.run("gradserve show parameters line"))
    (first.folder / "go").touch()
    again = first.begin(start_ben)
    anna.wait()
    again.wait()
    assert anna.output.splitlines()[-1].partition(": ")[2] == again.output.splitlines()[-1].partition(": ")[2]
    server.interrupt()
    worker.write_text(program.replace("time.sleep(0.05)", "time.sleep(0.01)"))

    guarded = first.begin(printed.commands())
    eventually(lambda: "serving on 0.0.0.0:50051" in guarded.output)
    for file in ("worker.py", "certificates/ca.pem", "token.txt"):
        shutil.copy(first.folder / file, second.folder)
    anna, ben = first.begin(printed.commands()), second.begin(printed.commands())
    anna.wait()
    ben.wait()
    assert anna.output.splitlines()[-1].partition(": ")[2] == ben.output.splitlines()[-1].partition(": ")[2]
    assert printed.is_over

    refused = second.begin("GRADSERVE_TOKEN=gradserve_wrong python worker.py eve 10.0.0.1:50051 ca.pem")
    assert refused.process.wait(PATIENCE_SECONDS) != 0
    assert "UnauthenticatedError" in refused.output
