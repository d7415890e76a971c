"""CudnnRNN on the host."""
