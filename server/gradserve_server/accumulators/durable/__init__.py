"""Accumulators that survive the end of their server.

The ledger of an accumulator depends on its events alone, and its sum on the gradients, in order. So a state directory
holds the events, the gradients of the current round (at level "gradient"), and the averages that are kept. `journal`
decides what has to be on disk before an event takes effect; `records` makes accumulators again when a server starts,
before it listens, and replaces long lists of events by the ledger that they led to. `inspection` looks at accumulators
without a server, `movable` and `unsharding` move them between the servers of a cluster whose size changes.
"""
