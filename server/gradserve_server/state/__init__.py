"""What is the same for everything whose changes are events."""
