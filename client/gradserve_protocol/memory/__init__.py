"""Memory that client and server use alike."""
