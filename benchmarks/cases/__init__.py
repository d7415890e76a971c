"""The benchmark cases: one module per case, and their names for the command line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from benchmarks.cases import (
    batch_norm_layer,
    cluster,
    durability,
    health,
    links,
    ops_batch_norm,
    ops_layer_norm,
    ops_rnn,
    parameters,
    push_pull,
    put_get,
    resnet50,
    rounds,
    server_memory,
    sharded,
    torch_training,
    tree,
)
from benchmarks.harness.comparison import Comparison
from benchmarks.harness.latency import LatencyMeasurement
from benchmarks.harness.memory import MemoryMeasurement

Measurement: TypeAlias = Comparison | LatencyMeasurement | MemoryMeasurement

CASES: dict[str, Callable[[], Sequence[Measurement]]] = {
    "put_get": put_get.comparisons,
    "round": rounds.comparisons,
    "small": rounds.small_comparisons,
    "push_pull": push_pull.comparisons,
    "parameters": parameters.comparisons,
    "parameters_tensorflow": parameters.comparisons_with_tensorflow,
    "parameters_small": parameters.small_comparisons,
    "resnet50": resnet50.comparisons,
    "health": health.measurements,
    "links": links.comparisons,
    "cluster": cluster.comparisons,
    "tree": tree.comparisons,
    "sharded": sharded.comparisons,
    "sharded_parameters": sharded.comparisons_of_parameters,
    "ops_batch_norm": ops_batch_norm.comparisons,
    "ops_layer_norm": ops_layer_norm.comparisons,
    "ops_rnn": ops_rnn.comparisons,
    "batch_norm_layer": batch_norm_layer.comparisons,
    "server_memory": server_memory.measurements,
    "parameters_memory": parameters.measurements,
    "durability": durability.comparisons,
    "torch_training": torch_training.comparisons,
}
"""The functions that return the measurements of each case, in the order of the report."""
