"""What an aggregator does with gradients that come when it is about to end."""

import pytest

from gradserve_server.errors import UnavailableError
from gradserve_server.upstream.batches import Batches, ForwardingRule


async def test_what_comes_after_the_end_does_not_wait_for_others() -> None:
    map_steps: list[list[str]] = []
    batches: Batches[str] = Batches(ForwardingRule(2, 60), map_steps.append)
    batches.add("a", "first", 1)
    assert batches.close(UnavailableError("the end")) == ["first"]
    with pytest.raises(UnavailableError, match="the end"):
        batches.add("a", "second", 1)
    assert (batches.num_waiting, map_steps) == (0, [])
