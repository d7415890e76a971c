"""The ids under which the servers hold the gradients of a sharded accumulator."""

from hashlib import blake2b

from gradserve_server.accumulators.identity import RequestId

NUM_BYTES = 16


def part_id(call: RequestId) -> str:
    """Returns the id of the gradient of a call, the same on all servers: a digest, in hexadecimal digits.

    Others learn it, who must not learn the id of the client.
    """
    return blake2b(f"{call.sequence}\n{call.client_id}".encode(), digest_size=NUM_BYTES).hexdigest()
