"""Benchmarks that run gradserve and its peers in alternation; see README.md in this folder."""
