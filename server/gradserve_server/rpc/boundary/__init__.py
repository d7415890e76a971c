"""The boundary around every call: a chain of interceptors, and gRPC on its far side."""
