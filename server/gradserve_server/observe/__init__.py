"""What the server notices about itself, and how people and programs get to see it."""
