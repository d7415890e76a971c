"""What the client of batch normalization layers does by itself, in front of a server that computes nothing."""
