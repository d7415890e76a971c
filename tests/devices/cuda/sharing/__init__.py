"""Memory of a GPU that client and server share, on a simulated one."""
