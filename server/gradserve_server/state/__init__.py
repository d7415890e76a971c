"""The parts that all objects share whose changes are events."""
