"""What can go wrong when accumulators move."""


class MoveError(Exception):
    """Accumulators could not be moved; every server has what it had before."""
