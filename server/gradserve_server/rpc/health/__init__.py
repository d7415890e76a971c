"""The standard health service."""
