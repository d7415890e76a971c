"""`gradserve what-if`, and the line of `show` and `top` that leads to it."""

from itertools import pairwise

import numpy as np
import pytest

import gradserve
from gradserve_protocol.server_status import AccumulatorStatus, ArrivalStatus, ParametersStatus, RoundStatus
from gradserve_server.commands.what_if import better_rules
from tests.commands.conftest import CommandLine

_SLOW = tuple(
    RoundStatus(step, 4.0 * step - 3, 4.0 * step, 3, (ArrivalStatus("a"), ArrivalStatus("b"), ArrivalStatus("c", 3.0)))
    for step in range(1, 8)
)
_EVEN = tuple(
    RoundStatus(step, float(step), step + 0.1, 2, (ArrivalStatus("a"), ArrivalStatus("b", 0.1))) for step in range(1, 8)
)


@pytest.mark.parametrize("kind", [AccumulatorStatus, ParametersStatus])
def test_a_better_rule_is_said_in_a_line(kind: type[AccumulatorStatus | ParametersStatus]) -> None:
    assert better_rules(kind("default", "net", rounds=_SLOW)) == [
        "what if: with 2 of 3 gradients, a round would have taken 1.0 s in place of 4.0 s, 12% of the gradients would "
        "have come too late, and 2.7 times as many would have counted"
    ]
    assert better_rules(kind("default", "net", rounds=_EVEN)) == []
    assert better_rules(kind("default", "net")) == []


def test_rounds_are_replayed_from_the_command_line(command_line: CommandLine, client: gradserve.Client) -> None:
    net = client.conditional_accumulator("float32", (), shared_name="replayed")
    for step in range(6):
        for worker in ("a", "b"):
            net.apply_grad(np.float32(1), local_step=step, worker_id=worker)
        net.take_grad(2)
    lines = command_line.run("what-if", "replayed").stdout.splitlines()
    assert lines[0].startswith("the last 6 rounds of 2 workers took ")
    assert lines[2].split() == ["REQUIRED", "GRACE", "ROUND", "FASTER", "TOO", "LATE", "GRADIENTS/S"]
    assert [line.split()[0] for line in lines[3:5]] == ["2", "1"]
    assert "as required" in lines[3]
    found = command_line.json("what-if", "replayed")
    assert (found["num_workers"], found["as_required"]["late"]) == (2, 0.0)
    required = [found["as_required"]["num_required"], *(each["num_required"] for each in found["alternatives"])]
    assert all(more > fewer for more, fewer in pairwise(required))


def test_what_cannot_be_replayed_says_why(command_line: CommandLine, client: gradserve.Client) -> None:
    client.conditional_accumulator("float32", (), shared_name="not replayed")
    done = command_line.run("what-if", "not replayed")
    assert done.exit_code == 1
    assert "too few rounds of default/not replayed to replay: expected 5 ended rounds with two workers" in done.stderr
    done = command_line.run("what-if", "nothing")
    assert done.exit_code == 1
    assert "no accumulator and no parameters default/nothing on " in done.stderr
