"""Chunks of about equal size."""

import pytest

from gradserve_server.devices.host.reduction.chunks import cut


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([], []),
        ([0, 0], []),
        ([3], [[(0, 0, 3)]]),
        ([4], [[(0, 0, 4)]]),
        ([9], [[(0, 0, 4)], [(0, 4, 8)], [(0, 8, 9)]]),
        ([1, 0, 2, 1, 1], [[(0, 0, 1), (2, 0, 2), (3, 0, 1)], [(4, 0, 1)]]),
        ([3, 6], [[(0, 0, 3), (1, 0, 1)], [(1, 1, 5)], [(1, 5, 6)]]),
    ],
)
def test_chunks_of_four(sizes: list[int], expected: list[list[tuple[int, int, int]]]) -> None:
    assert cut(sizes, 4) == expected
