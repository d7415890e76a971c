"""The most that Python's gRPC can do: streams of raw bytes that nobody reads.

No service written in Python on grpcio moves data faster; the additional time of a service is its own.
"""
