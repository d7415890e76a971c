"""A state directory: what a server keeps on disk."""
