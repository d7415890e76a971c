"""The specs of sharded accumulators."""

from gradserve.v1 import accumulator_pb2
from gradserve.wire.placement import Plan


def add_plan(spec: accumulator_pb2.AccumulatorSpec, plan: Plan, num_servers: int) -> None:
    """Makes the spec of an accumulator that of one that is sharded."""
    spec.num_shards = num_servers
    spec.device = "cpu"
    for component in spec.components:
        for server, num_rows in plan[component.name]:
            component.pieces.add(server=server, num_rows=num_rows)
