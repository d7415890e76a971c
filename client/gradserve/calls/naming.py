"""Unique names."""

from gradserve.calls.identity import RequestIds


def private_name(name: str, ids: RequestIds) -> str:
    """Returns a name that begins with `name` and that no other client uses."""
    return f"{name}-{ids.private_name()}"
