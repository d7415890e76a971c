"""What the server's resources have in common: names, leases, ids, and the memory and counts that they may take."""

from gradserve_server.resources.registry import DEFAULT_CONTAINER, Delete, Directory, InUse, Resource, ResourceKey

__all__ = ["DEFAULT_CONTAINER", "Delete", "Directory", "InUse", "Resource", "ResourceKey"]
