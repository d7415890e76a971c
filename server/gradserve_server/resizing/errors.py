"""What can go wrong when accumulators move."""


class MoveError(Exception):
    """Accumulators could not be moved; every server has what it had before."""


class UnknownOutcomeError(Exception):
    """Nobody could tell whether accumulators have moved; server 0 can, before the cluster starts."""


class AnnouncementError(Exception):
    """Accumulators have moved, for good, and who was to learn of it could not be told."""
