"""`gradserve doctor`: what keeps a client from training with a server, and the cures."""
