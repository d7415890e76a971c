"""Common parts of the server's resources: names, leases, ids, and budgets of memory and counts."""
