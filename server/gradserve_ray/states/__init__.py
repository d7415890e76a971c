"""Moves accumulators and parameters between the state directories of a cluster that changes its size, without Ray.

`moving` decides what moves and checks it by digests; a `member_state` is the state directory of one server; its `mark`
says what an interrupted change has left there. `movable` reads and writes what moves; `shards` says who has which
rows of what is sharded, and makes accumulators whole; `resharding` and `redividing` divide accumulators and parameters
again.
"""
