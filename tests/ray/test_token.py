"""Ray's token, if nobody has given one: commands in processes of their own, as a process reads it only once."""

import os
import stat
import subprocess
import sys
from pathlib import Path

from tests.ray.conftest import ray_folder
from tests.servers.polling import PATIENCE_SECONDS


def test_a_token_is_made_that_only_its_user_can_read(ray_token: str) -> None:
    with ray_folder(ray_token, leaves_token=True) as (folder, _):
        others = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}

        def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
            command = [sys.executable, "-m", "gradserve_server", "cluster", *arguments]
            limit = 4 * PATIENCE_SECONDS
            return subprocess.run(command, capture_output=True, text=True, env=others | variables, timeout=limit)

        up = run("up", "--address", "local", "--servers", "1", "--cpus-per-server", "0.1", "--", "--warm-up", "false")
        assert up.returncode == 0, up.stderr
        address = {"RAY_ADDRESS": up.stdout.split()[2]}
        token = Path(folder, "home", ".ray", "auth_token")
        assert len(token.read_text().strip()) >= 32
        assert stat.S_IMODE(token.stat().st_mode) == 0o600
        assert stat.S_IMODE(token.parent.stat().st_mode) == 0o700
        down = run("down", **address, RAY_AUTH_MODE="token")
        assert (down.returncode, down.stdout) == (0, "gradserve has ended, and its Ray\n"), down.stderr
