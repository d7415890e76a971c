"""The answer of `gradserve health` without the command, where the server serves and nothing else is asked."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gradserve.testing import ServerProcess
from gradserve_server.rpc.health import check
from tests.servers.connecting import no_server
from tests.servers.polling import PATIENCE_SECONDS

_PROGRAM = """
import sys
sys.argv = ["gradserve", *sys.argv[1:]]
from gradserve_server.__main__ import main
main()
slow = [name for name in ("numpy", "pydantic", "gradserve.client", "google.protobuf") if name in sys.modules]
print(*slow, sep=",")
"""


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("quick")
    with ServerProcess(folder, listen=("127.0.0.1:0", f"unix:{folder}/socket")) as process:
        yield process


def test_a_server_that_serves_is_asked_without_the_client_and_its_imports(process: ServerProcess) -> None:
    for address in process.addresses:
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM, "health", address, "--timeout", str(PATIENCE_SECONDS)],
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
            check=True,
        )
        assert done.stdout == f"{address}: SERVING\n\n"


@pytest.mark.parametrize("form", [["ADDRESS"], ["--address", "ADDRESS"], ["--address=ADDRESS"], ["-a", "ADDRESS"], []])
def test_the_address_is_given_as_to_the_command(process: ServerProcess, form: list[str]) -> None:
    arguments = [each.replace("ADDRESS", process.address) for each in form]
    variables = {} if form else {"GRADSERVE_ADDRESS": process.address}
    timeout = ["--timeout", str(PATIENCE_SECONDS)]
    assert check.line_if_serving([*arguments, *timeout], variables) == f"{process.address}: SERVING"


@pytest.mark.parametrize(
    ("arguments", "variables"),
    [
        (["SERVER", "--json"], {}),
        (["SERVER", "--tls"], {}),
        (["SERVER"], {"GRADSERVE_TLS_CA": "ca.pem"}),
        (["SERVER,SERVER"], {}),
        (["SERVER", "SERVER"], {}),
        (["SERVER", "--address", "SERVER"], {}),
        (["dns+srv://service"], {}),
        (["http://SERVER"], {}),
        (["SERVER", "--timeout", "inf"], {}),
        (["SERVER", "--timeout"], {}),
        (["--help"], {}),
        ([], {"GRADSERVE_ADDRESS": "nowhere"}),
    ],
)
def test_the_rest_is_left_to_the_command(
    process: ServerProcess, arguments: list[str], variables: dict[str, str]
) -> None:
    given = [each.replace("SERVER", process.address) for each in arguments]
    assert check.line_if_serving(given, variables) is None


def test_a_failure_is_left_to_the_command_which_says_more(tmp_path: Path) -> None:
    with no_server() as address:
        assert check.line_if_serving([address], {}) is None
    assert check.line_if_serving([f"unix:{tmp_path}/nobody"], {}) is None
