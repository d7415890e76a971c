"""The scenarios of TensorFlow's accumulators, and the three ways to run them."""
