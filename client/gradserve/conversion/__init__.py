"""Converts arguments of any library to values that can be sent, or reports which argument cannot be sent and why."""
