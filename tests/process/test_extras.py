"""An installation without the server says how to get it, by a command that works where it was installed from."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gradserve_protocol import extras
from tests.servers.polling import PATIENCE_SECONDS

ROOT = Path(__file__).parents[2]
METADATA = """\
Metadata-Version: 2.4
Name: gradserve
Version: 0.1.0
Provides-Extra: server
Provides-Extra: demo
Requires-Dist: numpy>=1.26
Requires-Dist: click>=8.1; extra == 'server'
Requires-Dist: not-installed-anywhere>=1; extra == "server"
Requires-Dist: nor.this_one; python_version >= "3" and extra == "server"
Requires-Dist: gradserve[server]; extra == 'demo'
Requires-Dist: nor-that; extra == 'demo'
"""
NEEDS = "gradserve's server needs not-installed-anywhere, nor.this_one; install it with: pip install "


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """A folder for the path in which gradserve is installed without the server's dependencies."""
    info = tmp_path / "gradserve-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(METADATA)
    return tmp_path


@pytest.mark.parametrize(
    ("origin", "arguments"),
    [
        pytest.param(None, "'gradserve[server]'", id="index"),
        pytest.param(
            {"url": "file:///home/me/my%20code", "dir_info": {"editable": True}},
            "-e '/home/me/my code[server]'",
            id="editable checkout",
        ),
        pytest.param(
            {"url": "file:///home/me/gradserve", "dir_info": {}},
            "'gradserve[server] @ file:///home/me/gradserve'",
            id="checkout",
        ),
        pytest.param(
            {"url": "file:///tmp/gradserve-0.1.0-py3-none-any.whl", "archive_info": {"hashes": {}}},
            "'gradserve[server] @ file:///tmp/gradserve-0.1.0-py3-none-any.whl'",
            id="wheel",
        ),
        pytest.param(
            {"url": "ssh://git@host/gradserve.git", "vcs_info": {"vcs": "git", "commit_id": "9e1f"}},
            "'gradserve[server] @ git+ssh://git@host/gradserve.git@9e1f'",
            id="repository",
        ),
    ],
)
def test_an_extra_is_installed_from_where_gradserve_was(
    plain: Path, monkeypatch: pytest.MonkeyPatch, origin: dict[str, Any] | None, arguments: str
) -> None:
    if origin is not None:
        (plain / "gradserve-0.1.0.dist-info" / "direct_url.json").write_text(json.dumps(origin))
    monkeypatch.syspath_prepend(plain)
    with pytest.raises(ModuleNotFoundError) as raised:
        extras.require("server")
    assert str(raised.value) == NEEDS + arguments


def run(plain: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(map(str, (plain, ROOT / "client", ROOT / "server")))
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )


def test_the_command_says_it_in_a_line(plain: Path) -> None:
    done = run(plain, "-m", "gradserve_server", "serve")
    assert (done.returncode, done.stderr) == (1, f"gradserve: {NEEDS}'gradserve[server]'\n")


@pytest.mark.parametrize("module", ["gradserve_testing", "gradserve_server.testing", "gradserve.testing"])
def test_importing_what_needs_it_says_it(plain: Path, module: str) -> None:
    done = run(plain, "-c", f"import {module}")
    assert done.stderr.endswith(f"gradserve_protocol.extras.MissingExtraError: {NEEDS}'gradserve[server]'\n")


def test_the_client_needs_none_of_it(plain: Path) -> None:
    done = run(plain, "-c", "import gradserve, gradserve.aio, sys; print('gradserve_server' in sys.modules)")
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr


def test_every_extra_of_this_installation_is_there() -> None:
    for extra in ("server", "demo", "dev"):
        extras.require(extra)


def test_from_its_sources_an_extra_is_installed_from_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "_DISTRIBUTION", "not-installed-anywhere")
    extras.require("server")
    assert extras.install_command("server") == f"pip install -e '{ROOT.resolve()}[server]'"
