"""Judges everything that only a GPU can settle: `make check-gpu`."""
