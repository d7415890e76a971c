"""Arrow Flight: gRPC with zero-copy messages, in C++."""
