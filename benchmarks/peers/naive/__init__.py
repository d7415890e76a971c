"""The service that most people write first: synchronous gRPC with a protobuf `bytes` field."""
