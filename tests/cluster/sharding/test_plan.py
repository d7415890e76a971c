"""Which server has what of a sharded accumulator."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gradserve.calls.accumulators.components import Component
from gradserve_protocol.arrays import parse_dtype
from gradserve_protocol.placement import SMALLEST_PIECE_BYTES, Piece, dense_bytes, plan_of

KIB = 1024
DIVIDED = 4 * SMALLEST_PIECE_BYTES


def dense(name: str, *shape: int, dtype: str = "float32") -> Component:
    return Component(name, np.dtype(dtype), shape, is_sparse=False)


def sparse(name: str, *shape: int) -> Component:
    return Component(name, np.dtype("float32"), shape, is_sparse=True)


def rows_of(num_bytes: int) -> int:
    """Returns the length of a vector of float32 of this size."""
    return num_bytes // 4


def whole(server: int) -> list[Piece]:
    return [Piece(server, 0)]


@pytest.mark.parametrize(
    ("components", "home", "size", "plan"),
    [
        pytest.param([dense("b")], 2, 3, {"b": whole(2)}, id="a scalar is on the home"),
        pytest.param(
            [dense("a", 8), dense("b", 8), dense("c", 8), dense("d", 8)],
            1,
            3,
            {"a": whole(1), "b": whole(2), "c": whole(0), "d": whole(1)},
            id="equal ones in turn, by name, from the home on",
        ),
        pytest.param(
            [dense("small", 8), dense("large", 16), dense("middle", 9)],
            0,
            2,
            {"large": whole(0), "middle": whole(1), "small": whole(1)},
            id="the largest first",
        ),
        pytest.param(
            [dense("w", rows_of(DIVIDED))],
            1,
            2,
            {"w": [Piece(1, rows_of(DIVIDED) // 2), Piece(0, rows_of(DIVIDED) // 2)]},
            id="one is divided",
        ),
        pytest.param(
            [dense("w", rows_of(2 * SMALLEST_PIECE_BYTES) - 1)], 0, 2, {"w": whole(0)}, id="too small to be divided"
        ),
        pytest.param([dense("w", 1, 1 << 20)], 0, 2, {"w": whole(0)}, id="a single row"),
        pytest.param([dense("w", 3, 1 << 20)], 0, 2, {"w": [Piece(0, 2), Piece(1, 1)]}, id="three large rows"),
        pytest.param(
            [dense("a", 1 << 20), dense("b", 1 << 20), dense("c", 1 << 20)],
            0,
            2,
            {"a": whole(0), "b": whole(1), "c": [Piece(0, 1 << 19), Piece(1, 1 << 19)]},
            id="only what does not fit is divided",
        ),
        pytest.param(
            [dense("a", rows_of(400 * KIB)), dense("b", rows_of(200 * KIB))],
            0,
            2,
            {"a": [Piece(0, rows_of(300 * KIB)), Piece(1, rows_of(100 * KIB))], "b": whole(1)},
            id="room is left for the others",
        ),
        pytest.param(
            [dense("w", 10, 10), sparse("t", 100, 8), sparse("u", 50, 8), sparse("v", 50, 8)],
            0,
            2,
            {"w": whole(0), "t": whole(1), "u": whole(0), "v": whole(0)},
            id="tables stay whole, and the largest is where dense components are not",
        ),
        pytest.param(
            [sparse("t", -1, 4), sparse("u", 1000, 8), sparse("v", 10, 1)],
            0,
            2,
            {"u": whole(0), "t": whole(1), "v": whole(1)},
            id="a table of unknown length is as long as the longest",
        ),
        pytest.param([sparse("t", -1, 4), sparse("u", -1, 8)], 0, 2, {"u": whole(0), "t": whole(1)}, id="all unknown"),
        pytest.param([dense("e", 0, 5), sparse("f", 0, 3)], 0, 2, {"e": whole(0), "f": whole(0)}, id="empty ones"),
    ],
)
def test_plans(components: Sequence[Component], home: int, size: int, plan: dict[str, list[Piece]]) -> None:
    """Clients of other languages rely on them."""
    assert plan_of(components, home, size) == plan


SHAPES = st.lists(st.sampled_from([0, 1, 2, 3, 7, 64, 100, 1000, 3000]), max_size=3).map(tuple)
COMPONENTS = st.lists(
    st.builds(
        Component,
        st.text("abcd", max_size=3),
        st.sampled_from([parse_dtype(name) for name in ("float16", "bfloat16", "float32", "float64")]),
        SHAPES,
        st.sampled_from([False, False, True]),
    ).filter(lambda each: bool(each.shape) or not each.is_sparse),
    min_size=1,
    max_size=12,
    unique_by=lambda each: each.name,
)


@given(
    COMPONENTS,
    st.integers(0, 7),
    st.integers(2, 8),
)
def test_every_row_is_on_one_server_and_servers_have_equally_much(
    components: list[Component], home: int, size: int
) -> None:
    plan = plan_of(components, home % size, size)
    assert plan.keys() == {each.name for each in components}
    loads = [0] * size
    grain = SMALLEST_PIECE_BYTES
    for each in components:
        pieces = plan[each.name]
        assert len({piece.server for piece in pieces}) == len(pieces)
        num_bytes = 0 if each.is_sparse else dense_bytes(each)
        if len(pieces) == 1:
            assert pieces[0].num_rows == 0
            loads[pieces[0].server] += num_bytes
        else:
            assert not each.is_sparse
            assert each.shape
            assert sum(piece.num_rows for piece in pieces) == each.shape[0]
            row = num_bytes // each.shape[0]
            for piece in pieces:
                assert piece.num_rows * row >= SMALLEST_PIECE_BYTES
                loads[piece.server] += piece.num_rows * row
        grain = max(grain, math.prod((each.shape or ())[1:]) * each.dtype.itemsize)
    assert max(loads) <= sum(loads) / size + 3 * grain


@given(COMPONENTS, st.integers(2, 8), st.data())
@example([dense("a", 4), dense("b", 4)], 2, None)
def test_the_order_of_components_does_not_matter(components: list[Component], size: int, data: object) -> None:
    shuffled = components[::-1] if data is None else data.draw(st.permutations(components))  # type: ignore[attr-defined]
    assert plan_of(shuffled, 0, size) == plan_of(components, 0, size)


@given(COMPONENTS, st.integers(0, 7), st.integers(2, 8))
def test_another_home_turns_the_plan(components: list[Component], home: int, size: int) -> None:
    home %= size
    turned = {
        name: [Piece((server + home) % size, rows) for server, rows in pieces]
        for name, pieces in plan_of(components, 0, size).items()
    }
    assert plan_of(components, home, size) == turned
