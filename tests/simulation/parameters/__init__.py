"""Parameters in simulated worlds."""
