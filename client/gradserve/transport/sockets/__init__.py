"""Carries calls over a server's sockets; docs/sockets.md specifies them."""
