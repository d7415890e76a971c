"""Durations in messages."""

from typing import Any

from google.protobuf.duration_pb2 import Duration


def decode_duration(message: Any, field: str) -> float | None:
    """Returns a Duration field in seconds, None if it is unset."""
    if not message.HasField(field):
        return None
    duration: Duration = getattr(message, field)
    return duration.seconds + duration.nanos * 1e-9
