"""`gradserve bench`: how fast a server answers from here."""
