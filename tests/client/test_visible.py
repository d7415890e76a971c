"""Texts from elsewhere, as terminals and logs may show them."""

import sys

import grpc
import pytest

from gradserve.transport.status import error_from_status
from gradserve_protocol.printing import visible, visible_lines


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("", ""),
        ("worker 7/net_\u00e9\u65e5 \U0001f600", "worker 7/net_\u00e9\u65e5 \U0001f600"),
        ("\x1b]52;c;cm0=\x07", r"\x1b]52;c;cm0=\x07"),
        ("\x9b2J\x7f\x00", r"\x9b2J\x7f\x00"),
        ("a\nb\r\tc\x0b\x85", r"a\nb\r\tc\x0b\x85"),
        ("\u2028\u2029", r"\u2028\u2029"),
        ("\u202eevil\u2066\u061c", r"\u202eevil\u2066\u061c"),
        ("a\u200b\u200d\ufeff\u00adb", r"a\u200b\u200d\ufeff\xadb"),
        ("\u00a0\u3000", r"\xa0\u3000"),
        ("\u3164\ufe0f\u115f\u2800", r"\u3164\ufe0f\u115f\u2800"),
        ("\U000e0041\U000e0100\U0010ffff", r"\U000e0041\U000e0100\U0010ffff"),
        ("\ud800", r"\ud800"),
    ],
)
def test_what_cannot_be_seen_is_escaped(text: str, shown: str) -> None:
    assert visible(text) == shown


def test_whatever_is_shown_is_one_printable_line() -> None:
    everything = visible("".join(map(chr, range(sys.maxunicode + 1))))
    assert everything.isprintable()
    everything.encode()


def test_only_the_first_of_several_lines_begins_a_line() -> None:
    assert visible_lines("why\x1b\n2026-01-01 all is well") == "why\\x1b\n  2026-01-01 all is well"


def test_messages_of_errors_do_nothing_to_a_terminal() -> None:
    error = error_from_status(grpc.StatusCode.NOT_FOUND, "no \x1b[2J\u202e\nforged", None)
    assert str(error) == "no \\x1b[2J\\u202e\n  forged [GS_NOT_FOUND]"
    assert error.message == "no \x1b[2J\u202e\nforged"
