"""`gradserve logs`."""

import logging
import time

import pytest

from gradserve_protocol.server_status import LogLine, ServerLog
from gradserve_server.commands.logs import NewLines
from tests.commands.conftest import CommandLine

_LOG = logging.getLogger("gradserve_server.test_logs_command")


def test_lines_are_printed_by_level_and_text(command_line: CommandLine) -> None:
    _LOG.warning("the \x1b[2J first\nof two lines")
    _LOG.error("the second")
    lines = command_line.run("logs", "--contains", "TEST_LOGS_COMMAND").stdout.splitlines()
    assert [line.split(" ", 2)[2] for line in lines[::2]] == [
        r"WARNING gradserve_server.test_logs_command: the \x1b[2J first",
        "ERROR gradserve_server.test_logs_command: the second",
    ]
    assert lines[1] == "    of two lines"
    (only,) = command_line.run("logs", "--contains", "test_logs_command", "--level", "error").stdout.splitlines()
    assert only == lines[2]
    assert command_line.run("logs", "--contains", "test_logs_command", "--lines", "1").stdout.splitlines() == [only]
    found = command_line.json("logs", "--contains", "test_logs_command")["lines"]
    assert [(each["level"], each["message"]) for each in found][-1] == ("ERROR", "the second")


def test_lines_are_followed(command_line: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    messages = ["second", "third"]

    def pause(_seconds: float) -> None:
        if not messages:
            raise KeyboardInterrupt
        _LOG.warning("followed: %s", messages.pop(0))

    _LOG.warning("followed: first")
    monkeypatch.setattr(time, "sleep", pause)
    lines = command_line.run("logs", "--follow", "--contains", "followed").stdout.splitlines()
    assert [line.rpartition(" ")[2] for line in lines] == ["first", "second", "third"]


def test_both_at_once_cannot_be(command_line: CommandLine) -> None:
    assert "choose one of both" in command_line.run("logs", "--follow", "--json").stderr


def test_a_server_that_was_started_again_begins_with_its_first_line() -> None:
    new = NewLines()
    assert (new.is_first("a"), new.after("a")) == (True, 0)
    new.noted("a", ServerLog((LogLine(4), LogLine(7)), "first run"))
    assert (new.is_first("a"), new.after("a"), new.after("b")) == (False, 7, 0)
    again = ServerLog((), "second run")
    assert new.has_restarted("a", again)
    assert not new.has_restarted("a", ServerLog((), "first run"))
    new.noted("a", ServerLog((LogLine(2),), "second run"))
    assert (new.after("a"), new.has_restarted("a", again)) == (2, False)
    new.noted("a", ServerLog((), "second run"))
    assert new.after("a") == 2
