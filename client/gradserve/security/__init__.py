"""Encrypted connections: certificates, and sockets that use them. Both sides share it."""
