"""Parts shared by all objects whose changes are events."""
