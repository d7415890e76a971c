"""Pictures of the server at work."""
