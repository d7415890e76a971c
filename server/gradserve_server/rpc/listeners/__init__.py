"""Listeners, which bind addresses and serve calls: over gRPC, and over sockets."""
