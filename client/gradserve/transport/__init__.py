"""Carries out the exchanges of operations over gRPC and sockets: blocking, and with asyncio.

For each server, a transport has a gRPC `channel` and the `sockets` beside it. What both transports do, `network` has
once, as coroutines; `blocking` and `aio` only wait. `driving` runs an operation to its end and several at the same
time: the first error ends the others, and is raised when all have ended. Operations stay in the calling thread or task;
only their calls are concurrent. `status` turns statuses into the client's errors, so `grpc.RpcError` never escapes. A
client that is forgotten without `close()` is ended by the thread of `lifetime`: its finalizer takes no lock, since the
garbage collector may interrupt the thread that holds it.
"""
