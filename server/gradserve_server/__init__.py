"""The gradserve server: gradient ops and conditional accumulators over gRPC.

Needs the extra `server` of the distribution; a plain install has only what the client needs. Importing this package
takes no time, because the command listens for signals before it imports what takes long.
"""
