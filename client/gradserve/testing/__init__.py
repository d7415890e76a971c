"""Real servers and networks for tests, and faults by name. Needs the `server` extra.

from gradserve.testing import ServerThread

def test_the_others_go_on_without_a_worker():
    with ServerThread() as server:
        server.faults.fail_at("worker-1", step=3)
        train(server.address)

`pytest_plugins = ["gradserve.testing.fixtures"]` in a conftest.py has the same as fixtures.
"""

from gradserve.public_names import publish as _publish
from gradserve_testing import (
    ConnectionFault,
    ConnectionFaults,
    Fault,
    Faults,
    FaultyProxy,
    InProcessServer,
    ServerProcess,
    ServerThread,
)

__all__ = [
    "ConnectionFault",
    "ConnectionFaults",
    "Fault",
    "Faults",
    "FaultyProxy",
    "InProcessServer",
    "ServerProcess",
    "ServerThread",
]

_publish(__name__, globals(), __all__)
