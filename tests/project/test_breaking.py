"""The protos are compared with the newest release, once there is one."""

import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "deploy" / "check_breaking.sh"


def run(*command: str | Path, cwd: Path) -> str:
    return subprocess.run(command, cwd=cwd, check=True, capture_output=True, text=True, timeout=60).stdout


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A repository with a commit and no release."""
    (tmp_path / "deploy").mkdir()
    shutil.copy(SCRIPT, tmp_path / "deploy")
    author = ("-c", "user.name=a", "-c", "user.email=a@localhost", "-c", "commit.gpgsign=false")
    run("git", "init", "--quiet", cwd=tmp_path)
    run("git", *author, "commit", "--quiet", "--allow-empty", "--message", "first", cwd=tmp_path)
    return tmp_path


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
