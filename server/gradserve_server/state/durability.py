"""How much of a resource survives the end of its server."""

from enum import Enum


class Durability(Enum):
    """What survives a crash of the server, or a loss of power; see the enum of the protos."""

    NONE = "NONE"
    """Nothing."""
    ROUND = "ROUND"
    """Rounds that have ended, from before anybody learns of their end."""
    GRADIENT = "GRADIENT"
    """Gradients, too, from before their senders learn that they count."""
