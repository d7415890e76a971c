"""Metrics for Prometheus. Only this package imports prometheus_client, and only the HTTP port imports this package."""
