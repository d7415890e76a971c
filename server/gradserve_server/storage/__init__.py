"""What resources keep on disk, and how their changes become events."""
