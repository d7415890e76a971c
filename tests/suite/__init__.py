"""How the suite runs: the part that every change needs, the whole of it, and what it prints."""
