"""The environment variables of clients. Commands and servers have others beside them, for their flags."""

from collections.abc import Mapping

ADDRESS_VARIABLE = "GRADSERVE_ADDRESS"
BULK_SOCKETS_VARIABLE = "GRADSERVE_BULK_SOCKETS"
GPU_ARRAYS_VARIABLE = "GRADSERVE_GPU_ARRAYS"
KEPT_BYTES_VARIABLE = "GRADSERVE_KEPT_BYTES"
LOCAL_AGGREGATOR_VARIABLE = "GRADSERVE_LOCAL_AGGREGATOR"
LOCAL_RANK_VARIABLE = "GRADSERVE_LOCAL_RANK"
NUM_REQUIRED_VARIABLE = "GRADSERVE_NUM_REQUIRED"
NUM_WORKERS_VARIABLE = "GRADSERVE_NUM_WORKERS"
RANK_VARIABLE = "GRADSERVE_RANK"
RESTART_PATIENCE_VARIABLE = "GRADSERVE_RESTART_PATIENCE"
TLS_VARIABLE = "GRADSERVE_TLS"
TLS_FILE_VARIABLES: Mapping[str, str] = {
    "ca": "GRADSERVE_TLS_CA",
    "certificate": "GRADSERVE_TLS_CLIENT_CERTIFICATE",
    "key": "GRADSERVE_TLS_CLIENT_KEY",
}
"""The variables with the files of a `TLS`, by its fields."""
TOKEN_VARIABLE = "GRADSERVE_TOKEN"
TRACING_VARIABLE = "GRADSERVE_TRACING"
TRANSPORT_VARIABLE = "GRADSERVE_TRANSPORT"
WORKER_ID_VARIABLE = "GRADSERVE_WORKER_ID"

DEFAULT_ADDRESS = "localhost:50051"
"""The address of clients and commands that are given none."""
CONNECT_VARIABLES = (ADDRESS_VARIABLE, TLS_VARIABLE, *TLS_FILE_VARIABLES.values())
"""The variables of commands that `connect` without an address takes, too."""

VARIABLES: Mapping[str, str] = {
    BULK_SOCKETS_VARIABLE: "sockets over which a large tensor travels at once on a long link, 1 to 16  [default: 4]",
    GPU_ARRAYS_VARIABLE: "auto: a server on the same GPU reads arrays there; copy: it gets copies  [default: auto]",
    KEPT_BYTES_VARIABLE: "most bytes of gradients that a client keeps until they are durable  [default: 1 GiB]",
    LOCAL_AGGREGATOR_VARIABLE: "number of workers on this host that share an aggregator, as connect(local_aggregator=)",
    RESTART_PATIENCE_VARIABLE: "seconds for which calls are repeated while the server may be starting  [default: 15]",
    TOKEN_VARIABLE: "the bearer token, as connect(token=)",
    TRACING_VARIABLE: "on: calls have OpenTelemetry spans, as connect(tracing=True)  [default: off]",
    TRANSPORT_VARIABLE: "way of calls: auto, shared_memory, bulk or grpc, as connect(transport=)  [default: auto]",
    WORKER_ID_VARIABLE: "id of the worker that this process is, the default of worker_id=; gradserve run sets it",
}
"""The variables of clients alone, with what they say."""

WORKER_VARIABLES: Mapping[str, str] = {
    LOCAL_RANK_VARIABLE: "for scripts: the worker's number on its machine, from 0",
    NUM_REQUIRED_VARIABLE: "for scripts: the number of workers that a round needs",
    NUM_WORKERS_VARIABLE: "for scripts: the number of workers, as far as their machine knows",
    RANK_VARIABLE: "for scripts: the worker's number in the run, from 0",
}
"""The variables that `gradserve run` sets for scripts, with what they say; nothing of gradserve reads them."""
