"""Converts what callers pass, of any library, to what can be sent, or says which argument cannot be sent and why."""
