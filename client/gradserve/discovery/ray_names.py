"""What a cluster on Ray is called there."""

NAMESPACE = "gradserve"
"""The namespace of Ray that has all actors of clusters."""


def directory_name(cluster: str) -> str:
    """Returns the name of the actor that knows where the servers of a cluster are.

    Its method `addresses` returns a list of texts in the order of the servers; a server that is not up yet has "".
    """
    return f"gradserve:{cluster}"
