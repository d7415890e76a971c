"""What most people write first: a synchronous gRPC service with a protobuf `bytes` field."""
