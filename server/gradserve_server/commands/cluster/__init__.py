"""`gradserve cluster`: servers on Ray."""
