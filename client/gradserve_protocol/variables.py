"""The environment variables of clients. Commands and servers have others beside them, for their flags."""

from collections.abc import Mapping

BULK_SOCKETS_VARIABLE = "GRADSERVE_BULK_SOCKETS"
GPU_ARRAYS_VARIABLE = "GRADSERVE_GPU_ARRAYS"
KEPT_BYTES_VARIABLE = "GRADSERVE_KEPT_BYTES"
LOCAL_AGGREGATOR_VARIABLE = "GRADSERVE_LOCAL_AGGREGATOR"
RESTART_PATIENCE_VARIABLE = "GRADSERVE_RESTART_PATIENCE"
TOKEN_VARIABLE = "GRADSERVE_TOKEN"
TRACING_VARIABLE = "GRADSERVE_TRACING"
TRANSPORT_VARIABLE = "GRADSERVE_TRANSPORT"

VARIABLES: Mapping[str, str] = {
    BULK_SOCKETS_VARIABLE: "sockets over which a large tensor travels at once on a long link, 1 to 16  [default: 4]",
    GPU_ARRAYS_VARIABLE: "auto: a server on the same GPU reads arrays there; copy: it gets copies  [default: auto]",
    KEPT_BYTES_VARIABLE: "most bytes of gradients that a client keeps until they are durable  [default: 1 GiB]",
    LOCAL_AGGREGATOR_VARIABLE: "number of workers on this host that share an aggregator, as connect(local_aggregator=)",
    RESTART_PATIENCE_VARIABLE: "seconds for which calls are repeated while the server may be starting  [default: 15]",
    TOKEN_VARIABLE: "the bearer token, as connect(token=)",
    TRACING_VARIABLE: "on: calls have OpenTelemetry spans, as connect(tracing=True)  [default: off]",
    TRANSPORT_VARIABLE: "way of calls: auto, shared_memory, bulk or grpc, as connect(transport=)  [default: auto]",
}
"""All of them, with what they say."""
