"""Names that nobody else gives."""

from gradserve.calls.identity import RequestIds


def private_name(name: str, ids: RequestIds) -> str:
    """Returns a name that no other client uses."""
    return f"{name}-{ids.private_name()}"
