"""What traces of client and server have in common."""
