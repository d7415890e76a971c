"""GRUBlockCell on the host."""
