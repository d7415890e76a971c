"""`gradserve cluster` without Ray. `tests/ray` has clusters."""

import sys

import pytest
from click.testing import CliRunner

from gradserve_server.commands.cli import cli


@pytest.mark.parametrize("command", [("up", "--servers", "1", "--address", "h:1"), ("status",), ("down",)])
def test_a_missing_ray_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    for name in [name for name in sys.modules if name.startswith("gradserve_ray.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)
    done = CliRunner().invoke(cli, ["cluster", *command])
    assert done.exit_code == 1
    assert "clusters need Ray; install it with: pip install" in done.output
    assert "[ray]" in done.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--servers", "1", "--name", "a b"), "--name: expected 1 to 63 letters, digits, or ._-"),
        (("--servers", "100000"), "--servers: expected a whole number from 1 to"),
        (("--servers", "1", "--", "--listen", "h:1"), "--listen is decided by the cluster"),
        (("--servers", "1", "--", "--cluster-index=1"), "--cluster-index=1 is decided by the cluster"),
        (("--servers", "0"), "0 is not in the range"),
        (("--servers", "1", "--cpus-per-server", "0"), "0.0 is not in the range"),
    ],
)
def test_a_wrong_option_is_refused_before_anything_starts(arguments: tuple[str, ...], message: str) -> None:
    done = CliRunner().invoke(cli, ["cluster", "up", *arguments])
    assert done.exit_code == 2
    assert message in done.output
