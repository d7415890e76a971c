"""The gRPC listener: the only part of the server that imports gRPC, apart from health probes."""
