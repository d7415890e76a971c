"""DiLoCo with `data` over a tree of aggregators, or over several servers: each sample counts once per epoch."""

from collections import Counter

import pytest

from tests.training.sharing import BATCH_SIZE, NUM_SAMPLES, SYNC_EVERY, Trained
from tests.trees.parameters.test_training import WORKERS, five_workers
from tests.trees.workers import at_once

ROUNDS = 4


@pytest.mark.parametrize(("in_tree", "size"), [(True, 1), (False, 2), (True, 2)])
def test_each_sample_counts_once(name: str, in_tree: bool, size: int) -> None:
    with five_workers(in_tree=in_tree, size=size, grace=0.05) as (clients, _):
        workers = [
            Trained(client, name, worker, num_required=5, sharded=size > 1)
            for client, worker in zip(clients, WORKERS, strict=True)
        ]
        for _ in range(ROUNDS):
            at_once(Trained.train, workers)
        assert {each.data.num_counted for each in workers} == {ROUNDS * 5 * SYNC_EVERY * BATCH_SIZE}
        assert workers[0].data.epoch == ROUNDS * 5 * SYNC_EVERY * BATCH_SIZE // NUM_SAMPLES
        joined = Trained(clients[-1], name, "f", num_required=5, sharded=size > 1)
        assert joined.data.state_dict() == workers[0].data.state_dict()
        taken = Counter(sample for each in workers for update in each.updates.values() for sample in update)
        assert {taken[sample] - workers[0].data.epoch for sample in range(NUM_SAMPLES)} <= {0, 1}
