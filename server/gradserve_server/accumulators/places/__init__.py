"""The memory of accumulators: on the host, or on a device."""
