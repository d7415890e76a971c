"""Tests of the memory of a device: its budget, and what moves to the host when it is full."""
