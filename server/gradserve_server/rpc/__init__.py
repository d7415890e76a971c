"""The gRPC face of the server: the only part that knows gRPC and protobuf."""
