"""Turns what callers pass, of whatever library, into what can be sent; or says which argument cannot be, and why."""
