"""The program of docs/howto/resume.md goes on after SIGKILL, at whatever step it comes, also as the only worker."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from deploy.site.places import ROOT
from gradserve.testing import ServerThread
from tests.project.blocks.reading import read_blocks
from tests.servers.polling import PATIENCE_SECONDS

PAGE = "docs/howto/resume.md"


def run(program: str, folder: Path) -> int:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'client'}"}
    return subprocess.run(
        [sys.executable, "-c", program], cwd=folder, env=environment, timeout=PATIENCE_SECONDS
    ).returncode


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("killed_at", [3, 19, 50])
def test_goes_on_where_it_was_killed(killed_at: int, tmp_path: Path) -> None:
    (block,) = (block for block in read_blocks(PAGE) if block.language == "python")
    with ServerThread() as server:
        program = block.said["setup"] + "\n" + block.text.replace("localhost:50051", server.address)
        before_saving = "        if worker.step % 10 == 0:\n"
        kill = (
            f"        if worker.step == {killed_at}:\n            import os; os.kill(os.getpid(), {signal.SIGKILL:d})\n"
        )
        assert before_saving in program
        assert run(program.replace(before_saving, kill + before_saving), tmp_path) == -signal.SIGKILL
        assert run(program, tmp_path) == 0
    saved = np.load(tmp_path / "checkpoint.npz")
    assert saved["step"] == 50
    np.testing.assert_allclose(saved["weights"], [3.0 * (1 - 0.9**50), -(1 - 0.9**50)], rtol=1e-12)
