"""What a servicer learns of a call."""

import time

from gradserve_server.rpc.boundary.chain import Call


def test_the_time_that_is_left_gets_less() -> None:
    call = Call("some.Method", time.monotonic() + 60)
    before, after = call.time_left(), call.time_left()
    assert before is not None
    assert after is not None
    assert 0 < after <= before <= 60


def test_no_time_is_left_after_the_deadline() -> None:
    assert Call("some.Method", time.monotonic() - 1).time_left() == 0


def test_without_a_deadline_a_client_waits_for_ever() -> None:
    assert Call("some.Method").time_left() is None
