"""Real servers and networks for tests, and faults by name. Needs the `server` extra.

from gradserve.testing import ServerThread

def test_the_others_go_on_without_a_worker():
    with ServerThread() as server:
        server.faults.fail_at("worker-1", step=3)
        train(server.address)

`pytest_plugins = ["gradserve.testing.fixtures"]` in a conftest.py has the same as fixtures.
"""

import gradserve_server.runtime.installed  # noqa: F401, I001  says which extra is missing, before anything else is imported

from gradserve.public_names import publish as _publish
from gradserve.testing.network import ConnectionFault, ConnectionFaults
from gradserve.testing.network import FaultyProxy
from gradserve.testing.server_thread import Fault, Faults
from gradserve.testing.server_process import ServerProcess
from gradserve.testing.server_thread import ServerThread

__all__ = ["ConnectionFault", "ConnectionFaults", "Fault", "Faults", "FaultyProxy", "ServerProcess", "ServerThread"]

_publish(__name__, globals(), __all__)
