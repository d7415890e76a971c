"""Errors of clusters on Ray."""


class ClusterError(Exception):
    """A cluster could not be started, found or ended; the message is for whoever has asked for it."""
