"""CudnnRNN, CudnnRNNBackprop and the ops on their parameters, with the semantics of TensorFlow's V3 ops."""
