"""Arrays on a GPU, as the client sees them."""
