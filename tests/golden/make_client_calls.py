"""Records the calls of a training session of this version: writes client_calls_VERSION.json beside this file.

python -m tests.golden.make_client_calls

Done once for each release, before it; the recordings of earlier versions stay.
"""

import gradserve
from gradserve_server.config import ListenConfig, ServerConfig
from gradserve_testing import LocalServer
from tests.golden import client_session
from tests.golden.recorded_calls import FOLDER, RecordedCall, recorder, write


def main() -> None:
    """Runs the session on a new server, and writes what was on the wire."""
    calls: list[RecordedCall] = []
    listen = ListenConfig(bulk_listen="off", shared_memory_socket="off", http_listen="off")
    with LocalServer(ServerConfig(listen=listen)) as server, recorder(server.address, calls) as address:
        client_session.run(address)
    write(calls, FOLDER / f"client_calls_{gradserve.__version__}.json")


if __name__ == "__main__":
    main()
