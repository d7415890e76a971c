"""Sharded accumulators: the home's decisions, and one server's shard of an accumulator.

At its home, a sharded accumulator is like any other, but its sum has no components: rounds, queue, journal and
exactly-once calls do not know that the values are elsewhere. `home` adds the ids of a round's parts to its average, and
says with each answer which parts are no longer needed. Every server with a piece has a `shard`: it holds each
gradient's part in a sum, and averages those that the home's answer names, once for all who ask. A shard decides nothing
and knows no other server. It belongs to one incarnation of the accumulator. Parts are written before they are
acknowledged; averages are not, since they can be computed again. `running_sum` adds gradients in shared memory up
before the decision, if their clients can stage them again. docs/concepts/sharding.md has the protocol.
"""
