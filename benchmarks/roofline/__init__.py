"""How fast this machine's memory and arithmetic let the kernels that missed a target be."""
