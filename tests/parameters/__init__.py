"""Parameters on the server."""
