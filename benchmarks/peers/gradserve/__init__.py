"""gradserve itself, by its public client and command line."""
