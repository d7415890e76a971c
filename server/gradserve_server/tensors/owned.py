"""What each identity holds of the stored tensors."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from gradserve_server.security.identity import Identity
from gradserve_server.security.shares import Shares
from gradserve_server.tensors.quotas import Quota


@dataclass
class Arriving:
    """Handles and bytes that an identity takes, and that are not stored yet.

    Attributes:
        left: Those that will not be stored, once that is known.
    """

    left: tuple[int, int]


class OwnedTensors:
    """The fair shares of handles and bytes."""

    def __init__(self, handles: Quota, memory: Quota, reserved: float) -> None:
        """Takes the quotas, and the fraction of each that is for identities who hold no more than that."""
        self._handles = Shares(handles, reserved, lambda limits: limits.max_handles)
        self._memory = Shares(memory, reserved, lambda limits: limits.max_bytes)

    @contextmanager
    def arriving(
        self, owner: Identity, num_handles: int, num_bytes: int, *, is_counted: bool = False
    ) -> Iterator[Arriving]:
        """Takes handles and bytes for an identity, and gives back at the end of the block what is left.

        Args:
            owner: The identity.
            num_handles: The handles.
            num_bytes: The bytes.
            is_counted: Whether the quota has the bytes as used already.

        Raises:
            ResourceExhaustedError: It holds too much.
        """
        self._handles.take(owner, num_handles)
        try:
            self._memory.take(owner, num_bytes, is_counted=is_counted)
        except BaseException:
            self._handles.give_back(owner.name, num_handles)
            raise
        arriving = Arriving((num_handles, num_bytes))
        try:
            yield arriving
        finally:
            self.give_back(owner.name, *arriving.left)

    def give_back(self, name: str, num_handles: int, num_bytes: int) -> None:
        """Gives back what the identity of this name held."""
        self._handles.give_back(name, num_handles)
        self._memory.give_back(name, num_bytes)
