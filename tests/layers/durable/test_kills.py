"""Real servers that are killed at any moment, and started again on their directory."""

import random
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import gradserve
from tests.servers.process import ServerProcess


@pytest.mark.parametrize("in_place", [True, False])
def test_every_forward_moves_the_averages_once(tmp_path: Path, in_place: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADSERVE_RESTART_PATIENCE", "60")
    server = ServerProcess(
        tmp_path, *("--state-dir", str(tmp_path / "state"), "--warm-up", "false", "--log-level", "warning")
    )
    steps = 60

    def work(address: str, moving_means: list[float]) -> None:
        with gradserve.connect(address, timeout=60) as client:
            updates = None if in_place else "update_ops"
            layer = client.batch_norm(0.5, scope="bn", fused=False, updates_collections=updates)
            for step in range(steps):
                layer.forward(np.full((2, 3), step + 1.0), keep_for_backward=False)
                if not in_place:
                    assert layer.run_updates() <= 1
                moving_means.append(float(layer.get_variables("moving_mean")["moving_mean"][0]))
            assert layer.describe().num_updates == steps

    with server:
        moving_means: list[float] = []
        worker = threading.Thread(target=work, args=(server.address, moving_means))
        worker.start()
        chance = random.Random(7)
        for _ in range(3):
            time.sleep(chance.uniform(0.05, 0.3))
            server.replace()
        worker.join(60)
    expected = [0.0]
    for step in range(steps):
        expected.append(expected[-1] - (expected[-1] - (step + 1.0)) * 0.5)
    assert moving_means == expected[1:]
