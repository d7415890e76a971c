"""Records the state directory of a server of this version: writes state_format_N.tar.xz beside this file.

python -m tests.golden.make_state_directory

Done once for each format, before the first release that writes it; the archives of earlier formats stay.
"""

import asyncio
import tarfile
import tempfile
from pathlib import Path

import gradserve
from gradserve_server.storage.database import FORMAT
from gradserve_testing import LocalServer
from tests.golden.state_directory import APPLY, archive_of, config_of, fill, fill_parameters
from tests.servers.raw_calls import RawCalls


def main() -> None:
    """Runs a server on a new directory, and packs that."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "state"
        with LocalServer(config_of(directory)) as server:
            with gradserve.connect(server.address) as client:
                fill(client)
            with RawCalls(server.address) as raw:
                raw.call("ApplyGradient", APPLY)
        asyncio.run(fill_parameters(directory))
        with tarfile.open(archive_of(FORMAT), "w:xz") as archive:
            archive.add(directory, "state")


if __name__ == "__main__":
    main()
