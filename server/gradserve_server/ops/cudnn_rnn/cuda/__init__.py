"""CudnnRNN on a GPU."""
