"""The least that Python's gRPC can do: streams of raw bytes that nobody looks at.

No service written in Python on grpcio moves data faster than this; what it needs beyond is its own.
"""
