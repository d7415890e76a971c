"""What the server's resources have in common: names, leases, ids, and the memory and counts that they may take."""
