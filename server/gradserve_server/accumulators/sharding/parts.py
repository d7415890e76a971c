"""Which incarnations of sharded accumulators a server may have parts of, whose home is another one."""

from typing import TypeAlias

from gradserve_server.accumulators.incarnations import check_ordered, earlier, is_later
from gradserve_server.errors import InvalidArgumentError
from gradserve_server.resources.cluster import Member
from gradserve_server.resources.registry import ResourceKey, Tombstones

_FIELD = "home_incarnation"
_MAX_DELETED = 10_000

_Deletion: TypeAlias = tuple[str, str, str]


class PartIncarnations:
    """Checks what requests say of the incarnations at other homes.

    Not thread-safe: used on the event loop only.
    """

    def __init__(self, member: Member | None) -> None:
        """Takes the server's place; None if it is in no cluster."""
        self._member = member
        self._deleted: Tombstones[_Deletion] = Tombstones(_MAX_DELETED)
        """The latest incarnations that were deleted, so that a late request does not make a part of them again. Others
        than who has deleted them do not see that: a name can be private to somebody of whom the server has lost it."""

    def is_part(self, key: ResourceKey, num_shards: int) -> bool:
        """Returns True if another server is the home of an accumulator, so that this one only has a part of it."""
        return bool(num_shards) and self._member is not None and not self._member.is_home(key)

    def check_creation(self, key: ResourceKey, num_shards: int, home_incarnation: str) -> None:
        """Checks that the creation of a part names the incarnation at the home, and that of others does not.

        Raises:
            InvalidArgumentError: It is otherwise.
        """
        if self.is_part(key, num_shards):
            check_ordered(home_incarnation, _FIELD)
        elif home_incarnation:
            raise InvalidArgumentError(
                f"expected none, as accumulator {str(key)!r} is made here, at its home, got {home_incarnation[:100]!r}",
                field=_FIELD,
            )

    def check_is_not_earlier(self, key: ResourceKey, here: str | None, home_incarnation: str) -> None:
        """Checks that no later incarnation is known than a request is for.

        Args:
            key: The name.
            here: The incarnation of which there is a part; None if there is none.
            home_incarnation: What the request says.

        Raises:
            AbortedError: One is.
        """
        deleted = self._deleted.reason(_deletion(key))
        if (here is not None and is_later(here, home_incarnation)) or (
            deleted is not None and not is_later(home_incarnation, deleted)
        ):
            raise earlier(str(key), _FIELD)

    def delete_up_to(self, key: ResourceKey, home_incarnation: str) -> None:
        """Notes that all incarnations up to one are deleted.

        Raises:
            InvalidArgumentError: No home can have made it, or this server is the home.
        """
        check_ordered(home_incarnation, _FIELD)
        if self._member is None or self._member.is_home(key):
            raise InvalidArgumentError(
                f"expected none, as this is the home of accumulator {str(key)!r}, got {home_incarnation[:100]!r}",
                field=_FIELD,
            )
        before = self._deleted.reason(_deletion(key))
        if before is None or is_later(home_incarnation, before):
            self._deleted.put(_deletion(key), home_incarnation)


def _deletion(key: ResourceKey) -> _Deletion:
    return key.container, key.name, key.user.name
