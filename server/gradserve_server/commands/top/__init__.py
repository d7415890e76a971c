"""`gradserve top`: a server at work, in a terminal."""
