"""Numbers as people read them."""

import pytest

from gradserve_server.commands.wording import duration, figure, size


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (102_400, "100 KiB"),
        (1 << 30, "1.0 GiB"),
        (1 << 60, "1024 PiB"),
    ],
)
def test_sizes(num_bytes: int, text: str) -> None:
    assert size(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 us"),
        (0.00025, "250 us"),
        (0.0015, "1.5 ms"),
        (1, "1.0 s"),
        (59.94, "59.9 s"),
        (60, "1 min"),
        (200, "3 min 20 s"),
        (3600, "1 h"),
        (187_200, "2 d 4 h"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_figures_have_the_unit_of_their_names() -> None:
    assert figure("max_bytes", 1 << 20) == "1.0 MiB"
    assert figure("client_lease", 60) == "1 min"
    assert figure("num_handles", 1_000_000) == "1,000,000"
