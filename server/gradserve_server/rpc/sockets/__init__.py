"""SocketService."""
