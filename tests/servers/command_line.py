"""The command line, in a process of its own."""

import os
import subprocess
import sys

from tests.servers.polling import PATIENCE_SECONDS


def run_cli(*args: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Runs `gradserve` to its end."""
    return subprocess.run(
        [sys.executable, "-m", "gradserve_server", *args],
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
