"""The accumulators of a state directory.

The ledger of an accumulator depends on its events alone, and its sum on the gradients, in order. So a state directory
holds the events, the gradients of the current round (at level "gradient"), and the averages that are kept.
`restoring` makes accumulators again when a server starts, before it listens, and inspects them without a server.
"""
