"""Gradients that are written to disk straight from memory that their client rewrites meanwhile."""

from pathlib import Path

import numpy as np
from click.testing import CliRunner

import gradserve
from gradserve_protocol.frames import Segment
from gradserve_protocol.v1 import accumulator_messages_pb2, accumulator_pb2
from gradserve_server.commands.cli import cli
from gradserve_server.config import RuntimeConfig, ServerConfig, StateConfig
from gradserve_testing import LocalServer
from tests.rpc.sockets.conftest import connector
from tests.rpc.sockets.test_attacked_regions import NUM_BYTES, SIZE, again_and_again, loosely_sealed, rewrite
from tests.rpc.sockets.test_regions import beside, hand_over

NUM_GRADIENTS = 100


def test_the_next_server_accepts_whatever_was_written(tmp_path: Path) -> None:
    state = StateConfig(state_dir=str(tmp_path / "state"), durability="gradient")
    config = ServerConfig(state=state, runtime=RuntimeConfig(warm_up=False))
    part = accumulator_pb2.ComponentGradient(dense=beside(np.float32, [SIZE], 0))
    request = accumulator_messages_pb2.ApplyGradientRequest(
        accumulator=accumulator_pb2.AccumulatorRef(name="a"), gradient=[part]
    )
    with LocalServer(config) as server, gradserve.connect(server.address) as client:
        client.conditional_accumulator("float32", (SIZE,), shared_name="a")
        with connector(server, "shared_memory")() as attacker, loosely_sealed() as (descriptor, _):
            hand_over(attacker, descriptor, NUM_BYTES)
            assert attacker.receive().header.code == 0
            with again_and_again(lambda: rewrite(descriptor)):
                for _ in range(NUM_GRADIENTS):
                    attacker.call("AccumulatorService.ApplyGradient", request, segments=[Segment(0, NUM_BYTES, 1, 0)])
                    assert attacker.receive().header.code == 0
    checked = CliRunner().invoke(cli, ["state", "check", str(tmp_path / "state")])
    assert checked.output.startswith(f"default/a: gradient, step 0, {NUM_GRADIENTS} gradients in the round"), (
        checked.output
    )
    with LocalServer(config) as server, gradserve.connect(server.address) as client:
        accumulator = client.conditional_accumulator("float32", (SIZE,), shared_name="a")
        assert accumulator.take_grad(NUM_GRADIENTS).shape == (SIZE,)
