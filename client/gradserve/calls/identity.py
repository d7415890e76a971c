"""The identity that makes a call count once, and names that nobody else gives."""

import itertools

from gradserve.v1 import accumulator_pb2


class RequestIds:
    """Numbers the calls of one client. Safe to use from several threads."""

    def __init__(self, client_id: str) -> None:
        """Takes an id that no other client has."""
        self.client_id = client_id
        self._numbers = itertools.count(1)

    def next(self) -> int:
        """Returns a number not used before."""
        return next(self._numbers)

    def name(self) -> str:
        """Returns a name that nobody else uses, and this client did not before."""
        return f"{self.client_id}-{self.next()}"

    def message(self, number: int) -> accumulator_pb2.RequestId:
        """Returns the id on the wire."""
        return accumulator_pb2.RequestId(client_id=self.client_id, sequence=number)
