"""Files with the versions and hashes of all that the image has, and what is made of them."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOCKED = sorted((ROOT / "deploy" / "locked").glob("*.txt"))
EXTRAS = [each.stem for each in LOCKED if each.stem != "build"]
ENTRY = re.compile(r"([a-z0-9.-]+)==(\S+)(?: ; [^\\]+)?((?: \\\n    --hash=sha256:[0-9a-f]{64})+)\n")
DIGEST = "sha256:" + 64 * "0"


def entries(path: Path) -> dict[str, set[str]]:
    """Returns the versions of the packages in a file, all of which have hashes."""
    text, found = path.read_text(), dict[str, set[str]]()
    for name, version, _ in ENTRY.findall(text):
        found.setdefault(name, set()).add(version)
    assert ENTRY.sub("", text) == "", "every line belongs to a version with hashes"
    return found


def pinned() -> dict[str, set[str]]:
    """Returns the versions in the files of constraints."""
    found = dict[str, set[str]]()
    for path in (ROOT / "constraints.txt", *(ROOT / "deploy").glob("constraints-cuda*.txt")):
        for name, version in re.findall(r"^([a-z0-9.-]+)==(\S+)", path.read_text(), re.MULTILINE):
            found.setdefault(name, set()).add(version)
    return found


@pytest.mark.parametrize("path", LOCKED, ids=lambda path: path.stem)
def test_versions_are_those_that_are_tested(path: Path) -> None:
    constraints = pinned()
    for name, versions in entries(path).items():
        assert versions <= constraints[name], f"{name}: run make locks"


@pytest.mark.parametrize("extra", EXTRAS)
def test_what_an_extra_asks_for_is_there(extra: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"][extra]]
    if "gradserve[server]" in wanted:
        wanted += project["optional-dependencies"]["server"]
    names = {re.match(r"[A-Za-z0-9-]+", each)[0].lower() for each in wanted} - {"gradserve"}  # type: ignore[index]
    assert names <= entries(ROOT / "deploy" / "locked" / f"{extra}.txt").keys()


def test_what_builds_the_wheel_is_there() -> None:
    (wanted,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    assert wanted.partition(">")[0] in entries(ROOT / "deploy" / "locked" / "build.txt")


def test_the_image_installs_nothing_without_a_hash() -> None:
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    installs = re.findall(r"pip(?: --python \S+)? (?:install|wheel) [^&\n]*", text)
    assert len(installs) == 4
    for each in installs:
        assert "--require-hashes" in each or "--no-index" in each or "--no-build-isolation" in each, each


def program(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("said", "status", "expected", "words"),
    [
        ("No known vulnerabilities found", 0, 0, "no known vulnerabilities"),
        ("Found 2 known vulnerabilities in 1 package\nName Version ID", 1, 1, "VULNERABLE"),
        ("ERROR: x: Dependency not found on PyPI and could not be audited", 1, 2, "NOT AUDITED"),
        ("Traceback\nConnectionError: Failed to resolve", 1, 2, "NOT AUDITED, .*: ConnectionError: Failed to resolve"),
    ],
    ids=["clean", "found", "unknown", "unreachable"],
)
def test_an_audit_says_whether_there_was_one(tmp_path: Path, said: str, status: int, expected: int, words: str) -> None:
    audit = program(tmp_path, "audit", f"cat <<'END'\n{said}\nEND\nexit {status}")
    command = [str(ROOT / "deploy" / "audit.sh"), str(audit), "some.txt"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == expected
    assert re.search(words, done.stdout + done.stderr)


@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        ({}, False),
        ({"RELEASE": "1"}, True),
        ({"RELEASE": "1", "PYTHON_IMAGE": "python:3.13-slim"}, True),
        ({"RELEASE": "1", "PYTHON_IMAGE": "python@sha256:0"}, True),
        ({"RELEASE": "1", "PYTHON_IMAGE": f"python:3.13-slim@{DIGEST}"}, False),
    ],
)
def test_a_release_needs_the_digest_of_its_base_image(tmp_path: Path, settings: dict[str, str], refused: bool) -> None:
    program(tmp_path, "docker", 'case "$1" in info) exit 0 ;; *) echo "the stub was told to $1" >&2; exit 1 ;; esac')
    environment = {"PATH": f"{tmp_path}:/usr/local/bin:/usr/bin:/bin", "ENGINE": "docker", **settings}
    done = subprocess.run(
        [str(ROOT / "deploy" / "image.sh")], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert ("told to build" in done.stderr) is not refused
    assert ("is not pinned" in done.stderr) is (refused or not settings)
