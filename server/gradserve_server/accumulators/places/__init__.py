"""Where accumulators are: in the memory of the host, or of a device."""
