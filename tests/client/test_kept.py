"""Which gradients a client keeps, and for how long."""

import numpy as np
import pytest

from gradserve.calls.accumulators.kept import KeptGradients, KeptMemory
from gradserve.calls.identity import CallId
from gradserve_protocol.v1 import accumulator_messages_pb2 as messages_pb2

ARRAY = np.arange(4, dtype=np.float64)


def accept(kept: KeptGradients, number: int, round_: int, server: str = "a", *, num_rounds: int = 0) -> None:
    answer = messages_pb2.ApplyGradientResponse(round=round_, num_rounds=num_rounds)
    kept.accepted(CallId("me", number), answer, server, lambda _: messages_pb2.ApplyGradientRequest(), [ARRAY])


def elsewhere(kept: KeptGradients, server: str) -> list[int]:
    return [each.call.sequence for each in kept.accepted_elsewhere(server)]


@pytest.fixture
def kept() -> KeptGradients:
    return KeptGradients(KeptMemory(3 * (ARRAY.nbytes + 2048)))


def test_what_is_kept_is_a_copy(kept: KeptGradients) -> None:
    accept(kept, 1, 1)
    (gradient,) = kept.accepted_elsewhere("b")
    assert gradient.arrays is not None
    assert gradient.arrays[0].tolist() == ARRAY.tolist()
    assert not np.shares_memory(gradient.arrays[0], ARRAY)


def test_a_round_that_has_ended_is_not_kept(kept: KeptGradients) -> None:
    accept(kept, 1, 1, num_rounds=1)
    accept(kept, 2, 2, num_rounds=1)
    accept(kept, 3, 3, num_rounds=1)
    assert elsewhere(kept, "b") == [2, 3]
    kept.learned("a", 2)
    assert elsewhere(kept, "b") == [3]


def test_another_run_says_nothing_of_gradients_that_it_has_not_seen(kept: KeptGradients) -> None:
    accept(kept, 1, 1, "a")
    kept.learned("b", 1)
    assert elsewhere(kept, "b") == [1]
    (gradient,) = kept.accepted_elsewhere("b")
    kept.again(gradient, messages_pb2.ApplyGradientResponse(round=2, num_rounds=1), "b")
    assert elsewhere(kept, "b") == []
    kept.learned("b", 1)
    assert len(kept) == 1
    kept.learned("b", 2)
    assert len(kept) == 0


def test_memory_is_limited_and_comes_back(kept: KeptGradients) -> None:
    for number in range(1, 5):
        accept(kept, number, 1)
    assert [each.arrays is None for each in kept.accepted_elsewhere("b")] == [False, False, False, True]
    kept.learned("a", 1)
    for number in range(5, 8):
        accept(kept, number, 2)
    accept(kept, 7, 2)  # the same again
    assert [each.arrays is None for each in kept.accepted_elsewhere("b")] == [False, False, False]
    assert kept.forget() == 3


def test_calls_of_two_kinds_with_the_same_number_are_two(kept: KeptGradients) -> None:
    for kind in ("automatic", "chosen"):
        answer = messages_pb2.ApplyGradientResponse(round=1)
        kept.accepted(CallId(kind, 4), answer, "a", lambda _: messages_pb2.ApplyGradientRequest(), [ARRAY])
    assert [each.call for each in kept.accepted_elsewhere("b")] == [("automatic", 4), ("chosen", 4)]
