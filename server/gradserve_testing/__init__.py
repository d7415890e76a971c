"""The test kit: real servers in this process or another, and faults by name, in the server and in its network.

Users import it as `gradserve.testing`, and the fixtures of pytest as `gradserve.testing.fixtures`; `LocalServer`, whose
insides tests may look at, is for our own tests. Needs the extra `server`. Nothing but tests needs this package.
"""

from gradserve_protocol.extras import require

require("server")

from gradserve_testing.in_process import InProcessServer
from gradserve_testing.network import ConnectionFault, ConnectionFaults, FaultyProxy
from gradserve_testing.server_process import ServerProcess
from gradserve_testing.server_thread import Fault, Faults, LocalServer, ServerThread

__all__ = [
    "ConnectionFault",
    "ConnectionFaults",
    "Fault",
    "Faults",
    "FaultyProxy",
    "InProcessServer",
    "LocalServer",
    "ServerProcess",
    "ServerThread",
]
