"""The blocking transport: operations run in the calling thread."""
