"""Accumulators that are sharded over the servers of a client."""
