"""Lifetimes and clients that cannot be."""

from typing import Any

import grpc
from google.protobuf.duration_pb2 import Duration

from gradserve_protocol.v1 import batch_norm_layer_messages_pb2, lease_messages_pb2, lease_pb2
from tests.bad_input.requests import INVALID, SPECS, Bad, Create, ref

TOO_LONG = "é" * 65


def lifetimes(message: str, field: str, code: grpc.StatusCode = INVALID, **lifetime: Any) -> list[Bad]:
    """Returns the creation of an accumulator, and of a layer."""
    made = lease_pb2.Lifetime(**lifetime)
    create_layer = batch_norm_layer_messages_pb2.CreateBatchNormLayerRequest(layer={"name": "new"}, lifetime=made)
    create = Create(accumulator=ref("new"), spec=SPECS["matrix"], lifetime=made)
    return [
        Bad("CreateAccumulator", create, message, field, code),
        Bad("CreateBatchNormLayer", create_layer, message, field, code),
    ]


BAD_LEASES = [
    *lifetimes("expected a positive idle_lease, got 0 s", "lifetime.idle_lease", idle_lease=Duration()),
    *lifetimes("expected a positive idle_lease, got -1 s", "lifetime.idle_lease", idle_lease=Duration(seconds=-1)),
    *lifetimes(
        "expected an idle_lease of at most 10,000 years, got 9.22337e+18 s",
        "lifetime.idle_lease",
        idle_lease=Duration(seconds=2**63 - 1),
    ),
    *lifetimes("expected at most 128 bytes, got 130", "lifetime.owner_client_id", owner_client_id=TOO_LONG),
    *(
        Bad(method, request(client_id=client_id), message, "client_id")
        for method, request in (
            ("HoldClientLease", lease_messages_pb2.HoldClientLeaseRequest),
            ("EndClientLease", lease_messages_pb2.EndClientLeaseRequest),
        )
        for client_id, message in (
            ("", "expected the id of a client, got an empty one"),
            (TOO_LONG, "expected at most 128 bytes, got 130"),
        )
    ),
    Bad(
        "CreateAccumulator",
        Create(accumulator=ref("matrix"), spec=SPECS["matrix"], lifetime={"owner_client_id": "me"}),
        "accumulator 'default/matrix' exists with another lifetime: it is shared, not private",
        "lifetime",
        grpc.StatusCode.ALREADY_EXISTS,
    ),
]
