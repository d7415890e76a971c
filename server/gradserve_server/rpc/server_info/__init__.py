"""ServerService."""
