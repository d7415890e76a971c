"""The blocking transport: operations run in the thread that calls."""
