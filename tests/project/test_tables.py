"""The tables of the documentation that follow from the code."""

import pytest

from deploy.tables import TABLES, environment_variables, with_table
from gradserve.calls.accumulators.kept import DEFAULT_KEPT_BYTES
from gradserve.calls.retries import RetryPolicy
from gradserve.transport.settings import SocketSettings
from gradserve_protocol.variables import (
    BULK_SOCKETS_VARIABLE,
    KEPT_BYTES_VARIABLE,
    RESTART_PATIENCE_VARIABLE,
    VARIABLES,
    WORKER_VARIABLES,
)
from gradserve_server.config import ServerConfig
from gradserve_server.config.settings import _OF_COMMANDS


@pytest.mark.parametrize("name", TABLES)
def test_the_page_has_the_table(name: str) -> None:
    page, make = TABLES[name]
    assert page.read_text() == with_table(page.read_text(), name, make()), "python -m deploy.tables --write"


def test_every_variable_is_in_the_table() -> None:
    settings = [name for concern in ServerConfig.model_fields.values() for name in concern.annotation.model_fields]  # type: ignore[union-attr]
    of_servers = {f"GRADSERVE_{name.upper()}" for name in (*settings, *_OF_COMMANDS)}
    listed = {line.split("`")[1] for line in environment_variables().splitlines() if line.startswith("| `GRADSERVE_")}
    assert listed == of_servers | VARIABLES.keys() | WORKER_VARIABLES.keys()


@pytest.mark.parametrize(
    ("variable", "default"),
    [
        (BULK_SOCKETS_VARIABLE, f"{1 + SocketSettings().strands}"),
        (KEPT_BYTES_VARIABLE, f"{DEFAULT_KEPT_BYTES >> 30} GiB"),
        (RESTART_PATIENCE_VARIABLE, f"{RetryPolicy().restart_patience:g}"),
    ],
)
def test_defaults_of_clients(variable: str, default: str) -> None:
    assert VARIABLES[variable].endswith(f"  [default: {default}]")
