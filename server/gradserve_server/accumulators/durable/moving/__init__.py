"""Accumulators of a state directory as values, which another state directory takes over.

No server uses either directory meanwhile. What comes is there beside what a server of the directory has: under the same
container and name there can be both. It takes the place of that when all state directories have what they are to have.

`rows` has accumulators but for the gradients that servers hold for sharded ones, which are in `parts`.
"""
