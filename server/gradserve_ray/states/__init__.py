"""Moves accumulators between the state directories of a cluster that changes its size. Knows nothing of Ray.

`moving` decides what moves and checks it by digests; a `member_state` is the state directory of one server; its `mark`
says what an interrupted change has left there.
"""
