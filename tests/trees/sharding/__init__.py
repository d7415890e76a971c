"""Accumulators of aggregators that are sharded over several servers upstream."""
