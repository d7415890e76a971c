"""The order of tests: what takes long begins early, so that all workers of a run end at the same time.

pytest-xdist gives each of its workers a share of the tests, and has a worker that is done take over the end of another
one's share. So what takes long comes early in a share. It mostly waits, for processes and for time to pass; between two
files of it, others keep the processors busy.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TypeVar

import pytest

LONG: Mapping[str, int] = {
    "accumulators/durable/test_kills.py": 30,
    "accumulators/places/test_service.py": 20,
    "accumulators/test_exactly_once.py": 70,
    "accumulators/test_killed_workers.py": 10,
    "accumulators/test_scenarios.py": 30,
    "arguments/test_absurd_arguments.py": 20,
    "bad_input/test_tables.py": 8,
    "benchmarks/test_memory.py": 30,
    "client/test_address.py": 9,
    "client/test_no_server.py": 19,
    "client/test_pacing.py": 70,
    "client/transport/test_lost_replies.py": 7,
    "client/transport/test_progress.py": 50,
    "cluster/parameters/test_kill_matrix.py": 40,
    "cluster/sharding/test_kill_matrix.py": 50,
    "cluster/sharding/test_scenarios.py": 30,
    "commands/test_export.py": 10,
    "commands/test_run.py": 20,
    "demo/test_batch_norm.py": 20,
    "demo/test_training.py": 20,
    "devices/cuda/test_compiles.py": 50,
    "faults/test_callers_memory.py": 70,
    "integrations/test_recipes.py": 70,
    "jax/functions/test_gradients.py": 25,
    "jax/test_average_by.py": 20,
    "kubernetes/test_growth.py": 30,
    "kubernetes/test_pods.py": 30,
    "languages/test_parameters.py": 40,
    "languages/test_workers.py": 60,
    "layers/durable/test_kills.py": 10,
    "layers/test_computation.py": 70,
    "layers/test_walk.py": 7,
    "links/test_full_links.py": 30,
    "links/test_long_links.py": 20,
    "ops/batch_norm/cuda/test_emulated.py": 20,
    "ops/cudnn_rnn/cuda/test_stand_in.py": 30,
    "ops/cudnn_rnn/test_cpu.py": 20,
    "ops/cudnn_rnn/test_reference.py": 20,
    "ops/test_ranges.py": 20,
    "parameters/durable/test_kills.py": 30,
    "parameters/test_bits.py": 20,
    "parameters/test_cut_connections.py": 30,
    "parameters/test_followers.py": 20,
    "parameters/test_machine.py": 6,
    "process/test_backup.py": 30,
    "process/test_memory.py": 40,
    "process/test_shutdown.py": 20,
    "process/test_shutdown_under_load.py": 20,
    "processors/test_processors.py": 40,
    "project/blocks/test_python.py": 20,
    "project/test_examples.py": 20,
    "project/test_mixed_frameworks.py": 20,
    "ray/test_cluster.py": 100,
    "ray/test_node_loss.py": 25,
    "ray/test_resize.py": 80,
    "ray/test_token.py": 20,
    "resizing/test_resharding.py": 40,
    "rpc/sockets/test_broken_rules.py": 12,
    "rpc/sockets/test_silence.py": 14,
    "rpc/test_cancelled_by_the_server.py": 11,
    "rpc/test_timeouts.py": 10,
    "simulation/sharding/test_faults.py": 30,
    "simulation/sharding/test_simulation.py": 30,
    "simulation/test_faults.py": 20,
    "torch/test_data.py": 20,
    "torch/test_elastic_training.py": 140,
    "torch/test_equal_weights.py": 18,
    "torch/test_examples.py": 60,
    "torch/test_replica.py": 17,
    "training/test_joining.py": 15,
    "training/test_server_restarts.py": 20,
    "training/test_shared_data.py": 6,
    "trees/parameters/test_counted_once.py": 30,
    "trees/parameters/test_training.py": 10,
    "trees/sharding/test_parameters.py": 25,
    "trees/sharding/test_restarts.py": 10,
    "trees/test_local.py": 11,
    "trees/test_restarts.py": 20,
    "tutorial/test_bad_worker.py": 10,
    "tutorial/test_tutorial.py": 10,
}
"""Files, relative to tests/, with the seconds that they take, roughly; those in both suites, in the longer one."""

_EARLY = 0.5
"""The part of a share by whose end all of its long files have begun."""

ItemT = TypeVar("ItemT")
TESTS = Path(__file__).parents[1]
"""The folder of all tests."""


def long_ones_first(items: list[pytest.Item], num_workers: int) -> None:
    """Puts tests into the order in which as many workers are to run them."""
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    seconds = {path: found for path in files if (found := _seconds_of(path))}
    others = iter([item for item in items if item.path not in seconds])
    ordered: list[pytest.Item] = []
    for number, paths in enumerate(dealt(seconds, num_workers)):
        long_ones = [files[path] for path in paths]
        size = (len(items) - len(ordered)) // (num_workers - number)  # as WorkStealingScheduling shares them out
        ordered += _between(long_ones, list(islice(others, max(0, size - sum(map(len, long_ones))))))
    items[:] = [*ordered, *others]


def _seconds_of(path: Path) -> int:
    return LONG.get(str(path.relative_to(TESTS)), 0) if path.is_relative_to(TESTS) else 0


def dealt(seconds: Mapping[Path, int], num_workers: int) -> Sequence[Sequence[Path]]:
    """Deals files out to workers, the longest first: each to the one that has least."""
    dealt: list[list[Path]] = [[] for _ in range(num_workers)]
    for path in sorted(seconds, key=lambda path: (-seconds[path], path)):
        min(dealt, key=lambda own: sum(seconds[each] for each in own)).append(path)
    return dealt


def _between(long_ones: Sequence[Sequence[ItemT]], others: Sequence[ItemT]) -> Iterable[ItemT]:
    """Yields the long ones with others between them, and the rest of the others after them."""
    waiting: Iterator[ItemT] = iter(others)
    for each in long_ones:
        yield from each
        yield from islice(waiting, int(_EARLY * len(others) / len(long_ones)))
    yield from waiting
