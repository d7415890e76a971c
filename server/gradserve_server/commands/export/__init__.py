"""`gradserve export`: rounds for TensorBoard, Weights & Biases, and files of JSON Lines."""
