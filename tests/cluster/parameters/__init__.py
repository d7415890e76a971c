"""Parameters that are sharded over the servers of a cluster."""
