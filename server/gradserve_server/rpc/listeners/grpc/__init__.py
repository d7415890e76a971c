"""The gRPC listener: the only part of the server that imports gRPC, apart from health probes.

Messages pass through `calls` and `flow` on their way between gRPC and the chain, because gRPC's core limits neither
memory nor time: they count the open calls, refuse requests that arrive too slowly, let replies leave while there is
room, and end connections of clients that read no replies or give up call after call. gRPC's core holds calls that have
arrived and not begun in one queue for all connections; `listener` limits that queue for each connection and in all.
`endpoint` keeps serving if a client has brought gRPC's server down.
"""
