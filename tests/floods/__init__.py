"""Attacks on a server: each made small, and measured in work and bytes, not in time."""
