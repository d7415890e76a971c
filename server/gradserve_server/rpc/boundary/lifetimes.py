"""Converts lifetimes to messages, and back."""

from google.protobuf.duration_pb2 import Duration

from gradserve.v1 import lease_pb2
from gradserve.wire.messages import encode_duration
from gradserve_server.resources.lifetimes import Lifetime
from gradserve_server.rpc.boundary.durations import decode_duration
from gradserve_server.security.identity import ANONYMOUS, Identity


def decode_lifetime(message: lease_pb2.Lifetime, user: Identity = ANONYMOUS) -> Lifetime:
    """Reads a lifetime.

    Raises:
        InvalidArgumentError: It is not a valid lifetime.
    """
    return Lifetime(user.own(message.owner_client_id), decode_duration(message, "idle_lease"))


def encode_idle_lease(lifetime: Lifetime) -> Duration | None:
    """Returns the idle lease of a lifetime, None if it has none."""
    return None if lifetime.idle_lease is None else encode_duration(lifetime.idle_lease)
