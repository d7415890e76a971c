"""The listener for sockets that carry whole calls in frames; docs/sockets.md specifies them.

A `connection` reads a call, gives it to the same chain and servicer as gRPC does, and writes the reply. `stream` has
the frames and `payloads` the tensors beside them, with the regions of shared memory in which some are. Headers and
messages are read on the event loop, where a small call costs two system calls, and no task if it need not wait.
`transfers` moves large payloads between sockets and memory in two threads, for any number of connections, slow ones
too. Over a long link a connection has strands: further sockets, over which large payloads are split. A Unix socket also
has regions: those of its client, mapped read-only, and those of the server that the client reads.

TLS is another kind of stream, chosen once for each connection: a `secure_stream` reads and writes frames over a socket
that encrypts, so everything above does not know the difference, and plain connections pay nothing for it.

The client can change its regions at any time. Only sums of dense gradients, which read each number once, use them in
place (`Live` references); for all other methods the connection copies them first. A call is answered, and a connection
ends, only when nobody reads its client's memory any more.
"""
