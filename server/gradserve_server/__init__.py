"""The gradserve server: gradient ops and conditional accumulators over gRPC.

Needs the extra `server` of the distribution; a plain install has what the client needs. Importing this takes no time:
the command listens for signals before it imports what does.
"""
