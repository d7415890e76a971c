"""A GPU in host memory: streams that run late, memory that is poisoned, and faults that are found."""
