"""TensorFlow's ConditionalAccumulator over its own gRPC runtime."""
