"""Sizes of payloads, and how titles name them."""

from __future__ import annotations

KB = 1_000
MB = 1_000_000


def size_name(num_bytes: int) -> str:
    """Returns "4 KB" or "100 MB"."""
    return f"{num_bytes // MB} MB" if num_bytes >= MB else f"{num_bytes // KB} KB"
