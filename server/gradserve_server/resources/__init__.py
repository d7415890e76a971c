"""Common parts of the server's resources: names, leases, ids, and quotas of memory and counts."""
