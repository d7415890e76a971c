"""What servers do for sharded accumulators, whatever clients ask for."""
