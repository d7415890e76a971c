"""What surrounds every call, whatever its transport: the chain of interceptors, statuses, and messages."""
