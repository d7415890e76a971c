"""The HTTP port: metrics, status and page. Only this package imports h11, and the server imports it late.

It has a thread and an event loop of its own. Nothing that a client sends reaches the server's event loop; that makes
snapshots and figures for all viewers together, no more often than `latest` allows.
"""
