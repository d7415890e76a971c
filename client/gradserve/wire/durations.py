"""Seconds as protobuf's Duration."""

from google.protobuf.duration_pb2 import Duration


def encode_duration(seconds: float) -> Duration:
    """Returns a number of seconds, finite and not beyond 10,000 years, to the nanosecond."""
    duration = Duration()
    duration.FromNanoseconds(round(seconds * 1e9))
    return duration
