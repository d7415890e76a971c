"""A network that fails."""
