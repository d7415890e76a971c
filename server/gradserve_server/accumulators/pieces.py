"""Which server has which rows of a component of a sharded accumulator."""

from collections.abc import Sequence
from typing import NamedTuple

from gradserve_server.errors import InvalidArgumentError
from gradserve_server.limits import quoted


class Piece(NamedTuple):
    """What one server has of a component.

    Attributes:
        server: The index of the server.
        num_rows: The number of rows; 0 for the whole component.
    """

    server: int
    num_rows: int

    def __repr__(self) -> str:
        return f"{self.num_rows or 'all'} rows on server {self.server}"


def check_servers(pieces: Sequence[Piece], num_shards: int, component: str, field: str) -> None:
    """Checks the servers of a component of an accumulator.

    Args:
        pieces: What each server has of it.
        num_shards: The number of servers over which the accumulator is sharded; 0 if it is not.
        component: The component's name, for messages.
        field: Its path in the request.

    Raises:
        InvalidArgumentError: There are none, some are not in the cluster or there twice, or some should not be there.
    """
    if not num_shards:
        if pieces:
            raise InvalidArgumentError(
                f"expected no pieces of component {quoted(component)} without num_shards, got {len(pieces)}",
                field=f"{field}.pieces",
            )
        return
    servers = [each.server for each in pieces]
    if not pieces or len(set(servers)) < len(servers) or not all(0 <= each < num_shards for each in servers):
        raise InvalidArgumentError(
            f"expected pieces of component {quoted(component)} on different servers from 0 to {num_shards - 1}, got "
            f"servers {servers}",
            field=f"{field}.pieces",
        )


def check_rows(pieces: Sequence[Piece], num_rows: int | None, component: str, field: str) -> None:
    """Checks that the pieces of a component have all its rows, which are `num_rows`; None if it cannot be divided.

    Raises:
        InvalidArgumentError: They do not.
    """
    rows = [each.num_rows for each in pieces]
    if rows == [0] or (num_rows is not None and min(rows) >= 1 and sum(rows) == num_rows):
        return
    expected = "one piece of 0 rows" if num_rows is None else f"pieces of {num_rows} rows in all, or one of 0"
    raise InvalidArgumentError(
        f"expected {expected} of component {quoted(component)}, got {rows}", field=f"{field}.pieces"
    )
