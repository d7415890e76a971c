"""The client's API is compared with the newest release, once there is one."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.servers.polling import PATIENCE_SECONDS

SCRIPT = Path(__file__).parents[2] / "deploy" / "check_api.sh"
GRIFFE = Path(sys.executable).with_name("griffe")
OLD = "def connect(address: str, timeout: float = 60.0) -> str:\n    return address\n"


def run(*command: str | Path, cwd: Path, fails: bool = False) -> str:
    done = subprocess.run(command, cwd=cwd, check=False, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert bool(done.returncode) is fails, done.stdout + done.stderr
    return done.stdout + done.stderr


def commit(clone: Path, code: str, file: str = "gradserve/__init__.py") -> None:
    (clone / "client" / file).parent.mkdir(parents=True, exist_ok=True)
    (clone / "client" / file).write_text(code)
    author = ("-c", "user.name=a", "-c", "user.email=a@localhost", "-c", "commit.gpgsign=false")
    run("git", "add", ".", cwd=clone)
    run("git", *author, "commit", "--quiet", "--message", "a change", cwd=clone)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A repository with a client, and no release."""
    (tmp_path / "deploy").mkdir()
    shutil.copy(SCRIPT, tmp_path / "deploy")
    run("git", "init", "--quiet", cwd=tmp_path)
    commit(tmp_path, OLD)
    return tmp_path


def test_without_a_release_it_says_so(clone: Path) -> None:
    said = run(clone / "deploy" / SCRIPT.name, "false", cwd=clone)
    assert said == "griffe check: not run, as there is no release to compare with (no tag v* in git)\n"


@pytest.mark.parametrize(
    ("change", "breaks"),
    [
        (OLD, False),
        (OLD + "\n\ndef added() -> None:\n    pass\n", False),
        (OLD.replace("60.0)", "60.0, token: str = '')"), False),
        (OLD.replace("timeout", "seconds"), True),
        (OLD.replace("connect", "open"), True),
        (OLD.replace(" = 60.0", ""), True),
    ],
    ids=["nothing", "an addition", "a default", "a renamed argument", "a renamed function", "no default"],
)
def test_what_breaks(clone: Path, change: str, breaks: bool) -> None:
    run("git", "tag", "v0.1.0", cwd=clone)
    commit(clone, change + "\n# changed\n")
    said = run(clone / "deploy" / SCRIPT.name, GRIFFE, cwd=clone, fails=breaks)
    assert said.startswith("griffe check: compared with v0.1.0\n")
    assert ("client/gradserve/__init__.py" in said) is breaks


@pytest.mark.parametrize("file", ["errors.py", "server_status.py", "tls.py", "v1/accumulator_pb2.pyi", "frames.py"])
def test_what_the_client_has_from_the_protocol(clone: Path, file: str) -> None:
    """Modules that only we import may change."""
    for each in ("__init__.py", "v1/__init__.py"):
        commit(clone, "", f"gradserve_protocol/{each}")
    commit(clone, OLD, f"gradserve_protocol/{file}")
    run("git", "tag", "v0.1.0", cwd=clone)
    commit(clone, OLD.replace("timeout", "seconds"), f"gradserve_protocol/{file}")
    breaks = file != "frames.py"
    said = run(clone / "deploy" / SCRIPT.name, GRIFFE, cwd=clone, fails=breaks)
    assert (f"client/gradserve_protocol/{file}" in said) is breaks


def test_every_module_of_the_protocol_that_users_see_is_compared() -> None:
    folder = SCRIPT.parents[1] / "client" / "gradserve"
    text = "".join((folder / name).read_text() for name in ("__init__.py", "errors.py"))
    modules = re.findall(r"^from gradserve_protocol\.(\w+) import", text, re.MULTILINE)
    assert {f"{module}.py" for module in modules} <= set(re.findall(r"\w+\.py", SCRIPT.read_text()))
