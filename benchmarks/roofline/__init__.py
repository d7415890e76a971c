"""The speed limits that this machine's memory and arithmetic set for the kernels that missed a target."""
