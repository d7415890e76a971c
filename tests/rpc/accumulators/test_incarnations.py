"""Calls for a certain run of the server, and what replies say of rounds."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradserve
from gradserve.calls.exchange import Unary
from gradserve_protocol.tensors import to_data_type
from gradserve_protocol.v1 import accumulator_messages_pb2 as messages_pb2
from gradserve_protocol.v1 import accumulator_pb2
from tests.servers.connecting import transport_of
from tests.servers.polling import PATIENCE_SECONDS
from tests.servers.restarting import RestartingServer

METHODS = (
    "GetAccumulator",
    "DeleteAccumulator",
    "ApplyGradient",
    "TakeGradient",
    "ReadAverage",
    "PushPull",
    "GetNumAccumulated",
    "SetGlobalStep",
)


def ask(client: gradserve.Client, method: str, **fields: Any) -> Any:
    request = getattr(messages_pb2, f"{method}Request")(**fields)
    return transport_of(client).run(_asking(Unary("AccumulatorService", method, request)))


def _asking(unary: Unary) -> Any:
    return (yield unary)


def test_a_call_for_an_earlier_run_has_no_effect(server_address: str) -> None:
    with gradserve.connect(server_address) as client:
        incarnation = client.server_info().incarnation
        assert incarnation
        made = client.conditional_accumulator("float32", (2,))
        ref = accumulator_pb2.AccumulatorRef(name=made.name)
        assert ask(client, "GetAccumulator", accumulator=ref).info.server_incarnation == incarnation
        ref.server_incarnation = incarnation
        earlier = accumulator_pb2.AccumulatorRef(name=made.name, server_incarnation="earlier")
        for method in METHODS:
            with pytest.raises(gradserve.AbortedError, match="was started again since") as caught:
                ask(client, method, accumulator=earlier)
            assert caught.value.field == "accumulator.server_incarnation"
        assert ask(client, "GetNumAccumulated", accumulator=ref).num_accumulated == 0


def test_replies_number_rounds(server_address: str) -> None:
    with gradserve.connect(server_address) as client:
        made = client.conditional_accumulator("float32", ())
        ref = accumulator_pb2.AccumulatorRef(name=made.name)
        gradient = accumulator_pb2.ComponentGradient()
        gradient.dense.dtype, gradient.dense.content = to_data_type(np.dtype("f4")), np.float32(1).tobytes()

        def apply(local_step: int) -> Any:
            return ask(client, "ApplyGradient", accumulator=ref, gradient=[gradient], local_step=local_step)

        assert (apply(0).round, apply(0).num_rounds) == (1, 0)
        made.set_global_step(7)
        assert (apply(0).round, apply(0).num_rounds) == (0, 0), "it was stale"
        assert apply(7).round == 1, "a step is no round"
        assert ask(client, "TakeGradient", accumulator=ref, num_required=1).average.round == 1
        assert (apply(8).round, apply(8).num_rounds) == (2, 1)
        assert ask(client, "GetNumAccumulated", accumulator=ref).num_rounds == 1


def test_a_gradient_that_a_restart_has_lost_counts_though_its_step_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRADSERVE_RESTART_PATIENCE", str(PATIENCE_SECONDS))
    request_id = accumulator_pb2.RequestId(client_id="me", sequence=1)
    with RestartingServer(tmp_path) as server, gradserve.connect(server.address) as client:
        made = client.conditional_accumulator("float32", (), shared_name="sum", reduction_type="SUM")
        ref = accumulator_pb2.AccumulatorRef(name=made.name)
        gradient = accumulator_pb2.ComponentGradient()
        gradient.dense.dtype, gradient.dense.content = to_data_type(np.dtype("f4")), np.float32(1).tobytes()

        def apply(**fields: Any) -> Any:
            return ask(client, "ApplyGradient", accumulator=ref, request_id=request_id, gradient=[gradient], **fields)

        assert apply().outcome == accumulator_pb2.APPLY_OUTCOME_ACCEPTED
        server.restart()
        made.set_global_step(3)
        applied = apply(accepted_before=True)
        assert (applied.outcome, applied.duplicate) == (accumulator_pb2.APPLY_OUTCOME_ACCEPTED, False)
        applied = apply()
        assert (applied.outcome, applied.duplicate) == (accumulator_pb2.APPLY_OUTCOME_ACCEPTED, True)
        assert made.take_grad(1) == 1
        server.restart()
        assert (apply(accepted_before=True).duplicate, made.num_accumulated()) == (True, 0)
