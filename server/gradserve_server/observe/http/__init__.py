"""The HTTP port: metrics, status and page. Only this package imports h11, and the server imports it late.

It has a separate thread and event loop. No request reaches the server's event loop, which takes snapshots and metrics
for all viewers together, no more often than `pictures.Latest` allows.
"""
