"""Which server has an accumulator."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradserve_protocol.placement import home_of

NAMES = [f"layer{number}/kernel" for number in range(2000)]


@pytest.mark.parametrize(
    ("container", "name", "size", "home"),
    [
        ("", "net", 1, 0),
        ("", "net", 2, 1),
        ("default", "net", 3, 2),
        ("other", "net", 3, 1),
        ("", "encoder", 3, 1),
        ("", "\u00e9", 7, 0),
    ],
)
def test_the_hash_is_that_of_the_documentation(container: str, name: str, size: int, home: int) -> None:
    """Clients of other languages rely on it."""
    assert home_of(container, name, size) == home


@pytest.mark.parametrize("size", [2, 3, 8])
def test_names_are_spread_evenly(size: int) -> None:
    counts = Counter(home_of("", name, size) for name in NAMES)
    assert set(counts) == set(range(size))
    assert max(counts.values()) < 1.25 * len(NAMES) / size


@given(st.text(max_size=20), st.integers(1, 20))
def test_a_name_moves_to_a_new_server_or_nowhere(name: str, size: int) -> None:
    before, after = home_of("", name, size), home_of("", name, size + 1)
    assert after in (before, size)
