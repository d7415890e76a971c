"""Files with saved parameters: their format, and what they say of a run. Knows no server."""
