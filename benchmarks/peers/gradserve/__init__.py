"""gradserve itself, through its public client and command line."""
