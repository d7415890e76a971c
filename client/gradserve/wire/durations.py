"""Converts seconds to protobuf's Duration, and back."""

from typing import Any

from google.protobuf.duration_pb2 import Duration


def encode_duration(seconds: float) -> Duration:
    """Returns a finite number of seconds, up to 10,000 years, as a Duration, to the nanosecond."""
    duration = Duration()
    duration.FromNanoseconds(round(seconds * 1e9))
    return duration


def decode_duration(message: Any, field: str) -> float | None:
    """Returns a Duration field of a message in seconds, None when it is unset."""
    if not message.HasField(field):
        return None
    duration: Duration = getattr(message, field)
    return duration.seconds + duration.nanos * 1e-9
