"""The protos are compared with the newest release, once there is one."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.servers.polling import PATIENCE_SECONDS

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "deploy" / "check_breaking.sh"


def run(*command: str | Path, cwd: Path) -> str:
    return subprocess.run(command, cwd=cwd, check=True, capture_output=True, text=True, timeout=PATIENCE_SECONDS).stdout


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A repository with a commit and no release."""
    (tmp_path / "deploy").mkdir()
    shutil.copy(SCRIPT, tmp_path / "deploy")
    run("git", "init", "--quiet", cwd=tmp_path)
    commit(tmp_path)
    return tmp_path


def commit(clone: Path) -> None:
    author = ("-c", "user.name=a", "-c", "user.email=a@localhost", "-c", "commit.gpgsign=false")
    run("git", "add", ".", cwd=clone)
    run("git", *author, "commit", "--quiet", "--allow-empty", "--message", "a change", cwd=clone)


def check(clone: Path, buf: str = "echo") -> str:
    """Runs the script with something in the place of buf; returns what it says."""
    return run(clone / "deploy" / SCRIPT.name, buf, cwd=clone)


def test_without_a_release_it_says_so(clone: Path) -> None:
    run("git", "tag", "nightly", cwd=clone)
    assert check(clone, "false") == (
        "buf breaking: not run, as there is no release to compare with (no tag v* in git)\n"
    )


def test_outside_of_git_too(clone: Path) -> None:
    shutil.rmtree(clone / ".git")
    assert check(clone, "false").startswith("buf breaking: not run")


def test_it_is_compared_with_the_newest_release(clone: Path) -> None:
    for version in ("v0.9.0", "v0.10.0", "v0.2.0", "web"):
        run("git", "tag", version, cwd=clone)
    says, given = check(clone).splitlines()
    assert says == "buf breaking: compared with v0.10.0"
    assert given == f"breaking --against {clone.resolve()}/.git#tag=v0.10.0"


def test_what_buf_finds_fails(clone: Path) -> None:
    run("git", "tag", "v1.0.0", cwd=clone)
    with pytest.raises(subprocess.CalledProcessError):
        check(clone, "false")


PROTO = 'syntax = "proto3";\npackage a.v1;\nmessage Tensor {\n  bytes content = 1;\n}\n'
BUF = shlex.split(re.findall(r"^BUF := (.*)", (ROOT / "Makefile").read_text(), re.MULTILINE)[0])


@pytest.mark.skipif(shutil.which("npx") is None, reason="needs npx")
@pytest.mark.parametrize(
    ("change", "breaks"),
    [("content = 1;\n  int64 step = 2;", ""), ("content = 2;", 'field "1"')],
    ids=["another field", "another number"],
)
def test_what_breaks(clone: Path, change: str, breaks: str) -> None:
    """With buf itself, and the settings of this repository."""
    shutil.copy(ROOT / "buf.yaml", clone)
    file = clone / "proto" / "a" / "v1" / "tensor.proto"
    file.parent.mkdir(parents=True)
    file.write_text(PROTO)
    commit(clone)
    run("git", "tag", "v0.1.0", cwd=clone)
    file.write_text(PROTO.replace("content = 1;", change))
    command = [str(clone / "deploy" / SCRIPT.name), *BUF]
    done = subprocess.run(command, cwd=clone, check=False, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert bool(done.returncode) is bool(breaks), done.stdout + done.stderr
    assert breaks in done.stdout
