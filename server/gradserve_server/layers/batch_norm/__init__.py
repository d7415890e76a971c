"""tf.contrib.layers.batch_norm, with its variables on the server."""
