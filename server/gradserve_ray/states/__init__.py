"""Moves accumulators and parameters between the state directories of a cluster that changes its size, without Ray.

`moving` decides what moves and checks it by digests; a `member_state` is the state directory of one server; its `mark`
says what an interrupted change has left there. `movable` reads and writes what moves; `division` says who has which
rows of what is sharded, `resharding` and `redividing` divide accumulators and parameters again, and `unsharding` makes
accumulators whole.
"""
