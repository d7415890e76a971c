"""The process to which a client belongs."""

import os

from gradserve.errors import ForkedClientError


class OwnProcess:
    """Remembers the process in which it was made, because gRPC's threads and sockets do not survive a fork."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    def check(self) -> None:
        """Raises ForkedClientError in any other process."""
        if os.getpid() != self._pid:
            raise ForkedClientError(
                f"this client was connected in process {self._pid} and is used in its fork {os.getpid()}; "
                "connect after forking, or start workers with multiprocessing's 'spawn' method"
            )
