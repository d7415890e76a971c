"""A server holds new rounds between two signals, and says which are open."""

import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import gradserve
from gradserve.calls.exchange import TimeLimits
from gradserve.testing import ServerProcess
from gradserve_server.accumulators.round_hold import HeldRounds
from tests.servers.connecting import change_times
from tests.servers.polling import PATIENCE_SECONDS, eventually, growing_limits

GRADIENT = {"w": np.arange(3, dtype=np.float32)}


def test_rounds_end_and_none_begins(tmp_path: Path) -> None:
    """The gradient that would begin one is sent again until rounds may begin, and counts once."""
    file = tmp_path / "rounds"
    with (
        ServerProcess(tmp_path, "--rounds-file", str(file), "--state-dir", str(tmp_path / "state")) as server,
        gradserve.connect(server.address, timeout=PATIENCE_SECONDS) as client,
        ThreadPoolExecutor(1) as threads,
    ):
        net = client.gradient_accumulator(GRADIENT, "net")
        volatile = client.gradient_accumulator(GRADIENT, "volatile", durability="none")
        net.apply_grad(GRADIENT, 0, worker_id="a")
        assert HeldRounds.read(file) is None
        server.signal(signal.SIGUSR1)
        held = eventually(lambda: HeldRounds.read(file), lambda seen: seen is not None)
        assert held == HeldRounds({"default/net": 1}, ("default/volatile",))
        with gradserve.connect(server.address, timeout=PATIENCE_SECONDS) as other:
            hasty = other.gradient_accumulator(GRADIENT, "volatile", durability="none")
            for limit in growing_limits(1.0):  # as long as it has no answer, it does not know why
                change_times(hasty, TimeLimits(limit))
                with pytest.raises((gradserve.ResourceExhaustedError, gradserve.DeadlineExceededError)) as refused:
                    hasty.apply_grad(GRADIENT)
                if "holds new rounds" in str(refused.value):
                    break
        average = net.push_pull(GRADIENT, 2, 0, worker_id="b")
        np.testing.assert_array_equal(average["w"], GRADIENT["w"])
        eventually(lambda: HeldRounds.read(file), lambda seen: seen == HeldRounds({}, ("default/volatile",)))
        assert net.apply_grad(GRADIENT, 0).outcome is gradserve.Outcome.STALE
        next_round = threads.submit(net.push_pull, GRADIENT, 1, 1)
        server.signal(signal.SIGUSR2)
        np.testing.assert_array_equal(next_round.result()["w"], GRADIENT["w"])
        assert not file.exists()
        assert net.info().global_step == 2
        assert volatile.num_accumulated() == 0
