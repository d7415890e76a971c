"""Tests of clusters on Ray need Ray; without it they are skipped."""

import json
import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner, Result

from gradserve_server.commands.cli import cli
from tests.servers.polling import PATIENCE_SECONDS, eventually

if find_spec("ray") is None:  # It is not imported: what it finds in the environment then is what it goes by.
    pytest.skip("Ray is not installed: make install-frameworks", allow_module_level=True)


class RayCluster:
    """A cluster of three durable servers, on a Ray of its own."""

    name = "train"
    size = 3

    def run(self, *arguments: str, fails: bool = False) -> Result:
        """Runs `gradserve cluster ARGUMENTS`."""
        done = CliRunner().invoke(cli, ["cluster", *arguments])
        assert (done.exit_code != 0) is fails, done.output
        return done

    def status(self, name: str = name) -> list[dict[str, Any]]:
        """Returns the servers as `gradserve cluster status --json` tells them, whether all of them serve or not."""
        done = CliRunner().invoke(cli, ["cluster", "status", name, "--json"])
        status = json.loads(done.stdout)
        assert status["name"] == name
        assert status["serves"] is (done.exit_code == 0)
        servers: list[dict[str, Any]] = status["servers"]
        return servers

    def back(self, index: int, restarts: int) -> dict[str, Any]:
        """Waits until a server was started again so often, and serves; returns it."""
        servers = eventually(self.status, lambda seen: seen[index]["serves"] and seen[index]["restarts"] == restarts)
        return servers[index]


@pytest.fixture(scope="session")
def ray_token() -> str:
    """The token of all Rays of this process, which reads it only once."""
    return secrets.token_hex(32)


@contextmanager
def ray_folder(token: str, *, leaves_token: bool = False) -> Iterator[tuple[Path, pytest.MonkeyPatch]]:
    """Sets the environment for a Ray of its own: a folder, a token, and a home in it, where Ray leaves none.

    At the end, none of the processes that came with it are left.
    """
    with tempfile.TemporaryDirectory(prefix="ray-") as folder, pytest.MonkeyPatch.context() as patch:
        home = Path(folder, "home")
        home.mkdir()
        patch.setenv("HOME", str(home))
        patch.setenv("RAY_TMPDIR", folder)  # Short: Ray has sockets in it.
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", token)
        patch.delenv("RAY_AUTH_TOKEN_PATH", raising=False)
        patch.setenv("GRADSERVE_RESTART_PATIENCE", str(PATIENCE_SECONDS))
        patch.delenv("RAY_ADDRESS", raising=False)
        before = _processes()
        yield Path(folder), patch
        eventually(lambda: [each for each in _processes() - before if _is_of(each, folder)], lambda left: not left)
        assert (home / ".ray").exists() is leaves_token, "otherwise the token is that of the environment"


@pytest.fixture(scope="package")
def cluster(tmp_path_factory: pytest.TempPathFactory, ray_token: str) -> Iterator[RayCluster]:
    """The cluster."""
    with ray_folder(ray_token) as (folder, patch):
        state = tmp_path_factory.mktemp("states")
        running = RayCluster()
        up = ["up", "--address", "local", "--servers", "3", "--name", running.name, "--state-dir", str(state)]
        up += ["--cpus-per-server", "0.5", "--timeout", str(4 * PATIENCE_SECONDS)]
        said = running.run(*up, "--", "--warm-up", "false").stdout.splitlines()
        assert said[0].startswith("Ray at 127.0.0.1:")
        assert [line.split(" at ")[0] for line in said[1:4]] == ["server 0", "server 1", "server 2"]
        patch.setenv("RAY_ADDRESS", said[0].split()[2])
        try:
            yield running
        finally:
            assert running.run("down").stdout == "train has ended, and its Ray\n"
        assert not Path(folder, "ray", "ray_current_cluster").exists()


def _processes() -> set[psutil.Process]:
    return set(psutil.process_iter())


def _is_of(process: psutil.Process, ray_folder: str) -> bool:
    try:
        of_this_process = process.pid == os.getpid() or "resource_tracker" in " ".join(process.cmdline())
        return process.environ().get("RAY_TMPDIR") == ray_folder and not of_this_process
    except psutil.Error:
        return False  # It has ended.
