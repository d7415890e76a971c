"""GRUBlockCell on a GPU."""
