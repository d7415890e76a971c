"""The boundary around every call: a chain of interceptors inside, and gRPC outside."""
