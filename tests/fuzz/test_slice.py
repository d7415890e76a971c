"""Nothing that comes from others makes a server or a codec crash, hang or grow, or end with INTERNAL or UNKNOWN."""

import pytest

from tests.fuzz.fuzzing import fuzz
from tests.fuzz.targets.table import TARGETS

NUM_INPUTS = {"calls": 400, "shards": 200, "codecs": 3000, "frames": 150, "state": 30}


@pytest.mark.parametrize("name", TARGETS)
def test_the_corpus_and_some_mutations(name: str) -> None:
    with TARGETS[name]() as target:
        outcome = fuzz(name, target, seed=1, num_inputs=NUM_INPUTS[name])
    assert outcome.found == {}
    assert outcome.num_inputs > NUM_INPUTS[name]
