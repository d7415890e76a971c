"""Tests of the memory of a device: its quota, and what moves to the host when it is full."""
