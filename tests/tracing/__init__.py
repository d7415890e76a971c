"""Spans of client and server."""
