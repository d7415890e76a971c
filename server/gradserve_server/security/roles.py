"""The roles of identities."""

from enum import IntEnum


class Role(IntEnum):
    """What an identity may do in a container. Each role may do everything that those before it may."""

    WORKER = 1
    """Use what exists: gradients, averages, forwards, tensors, ops."""
    CHIEF = 2
    """Also create, delete and change it: takes, steps, updates, variables."""
    ADMIN = 3
    """Everything. An admin of all containers also reaches what belongs to other identities."""

    def __str__(self) -> str:
        return self.name.lower()
