"""Starts contestants, measures them in alternation, compares and reports."""
