"""LeaseService."""
