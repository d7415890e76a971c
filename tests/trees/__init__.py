"""Aggregators: trees of servers."""
