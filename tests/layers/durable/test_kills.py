"""Real servers that are killed at any moment, and started again on their directory."""

import random
import threading
from functools import partial
from operator import le
from pathlib import Path

import numpy as np
import pytest

import gradserve
from gradserve.testing import ServerProcess
from tests.servers.polling import PATIENCE_SECONDS, eventually


def test_every_forward_moves_the_averages_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADSERVE_RESTART_PATIENCE", str(PATIENCE_SECONDS))
    server = ServerProcess(
        tmp_path, *("--state-dir", str(tmp_path / "state"), "--warm-up", "false", "--log-level", "warning")
    )
    steps = 60
    moving_means: dict[bool, list[float]] = {True: [], False: []}

    def work(address: str, *, in_place: bool) -> None:
        with gradserve.connect(address, timeout=PATIENCE_SECONDS) as client:
            updates = None if in_place else "update_ops"
            layer = client.batch_norm(0.5, scope=f"bn{in_place}", fused=False, updates_collections=updates)
            for step in range(steps):
                layer.forward(np.full((2, 3), step + 1.0), keep_for_backward=False)
                if not in_place:
                    assert layer.run_updates() <= 1
                moving_means[in_place].append(float(layer.get_variables("moving_mean")["moving_mean"][0]))
            assert layer.describe().num_updates == steps

    with server:
        workers = [
            threading.Thread(target=work, args=(server.address,), kwargs={"in_place": in_place})
            for in_place in moving_means
        ]
        for worker in workers:
            worker.start()
        # Also because a client that has not yet heard of its server does not wait for it to come back.
        progress = random.Random(7).randrange(5, 40)
        eventually(lambda: min(map(len, moving_means.values())), partial(le, progress))
        server.restart()
        for worker in workers:
            worker.join(PATIENCE_SECONDS)
    expected = [0.0]
    for step in range(steps):
        expected.append(expected[-1] - (expected[-1] - (step + 1.0)) * 0.5)
    assert moving_means == {True: expected[1:], False: expected[1:]}
