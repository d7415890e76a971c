"""How arrays are cut into vectors, tiles and blocks."""

from typing import Any

import numpy as np
import pytest

from gradserve_server.devices.cuda.programs import Limits
from gradserve_server.ops.batch_norm import cuda as launches
from gradserve_server.ops.batch_norm.cuda import (
    MAX_THREADS,
    Tiling,
    balanced_splits,
    canonical,
    split_tiling,
    vector_width,
    whole_tilings,
)
from gradserve_server.ops.batch_norm.spec import (
    ForwardAttributes,
    Geometry,
    GradAttributes,
)
from gradserve_server.tensors.spec import BFLOAT16, FLOAT16, FLOAT32, FLOAT64

H200 = Limits(num_multiprocessors=132, shared_bytes=227 << 10)

A_FEW_IMAGES = Geometry(32, 256, 14 * 14)
A_FEW_ROWS = Geometry(32 * 7 * 7, 2048, 1)
LARGE_IMAGES = Geometry(32, 64, 56 * 56)
LARGE_ROWS = Geometry(32 * 56 * 56, 64, 1)
GEOMETRIES = (
    *(A_FEW_IMAGES, A_FEW_ROWS, LARGE_IMAGES, LARGE_ROWS),
    *(Geometry(1, 1, 10**7), Geometry(1, 4096, 1), Geometry(10**6, 3, 1), Geometry(64, 3, 49), Geometry(0, 5, 1)),
    *(Geometry(7, 0, 1), Geometry(2, 17, 5), Geometry(300, 1000, 1), Geometry(10**6, 40, 1), Geometry(1, 10**5, 3)),
)


@pytest.mark.parametrize(
    ("geometry", "itemsize", "width"),
    [
        (Geometry(9, 64, 1), 2, 8),
        (Geometry(9, 12, 1), 2, 4),
        (Geometry(9, 6, 1), 2, 1),
        (Geometry(9, 64, 1), 4, 4),
        (Geometry(9, 6, 1), 4, 1),
        (Geometry(9, 6, 1), 8, 2),
        (Geometry(9, 64, 49), 4, 1),
        (Geometry(9, 3, 196), 4, 4),
        (Geometry(9, 3, 196), 2, 4),
    ],
)
def test_vectors_lie_within_a_row_of_channels_or_an_image(geometry: Geometry, itemsize: int, width: int) -> None:
    assert vector_width(geometry, itemsize, is_aligned=True) == width
    assert vector_width(geometry, itemsize, is_aligned=False) == 1


def test_one_channel_is_one_image() -> None:
    assert canonical(Geometry(30, 1, 1)) == canonical(Geometry(3, 1, 10)) == Geometry(1, 1, 30)


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("itemsize", [2, 4, 8])
def test_blocks_cover_everything_and_are_what_kernels_take(geometry: Geometry, itemsize: int) -> None:
    geometry = canonical(geometry)
    width = vector_width(geometry, itemsize, is_aligned=True)
    for tiling in (split_tiling(geometry, width, itemsize, H200), *whole_tilings(geometry, width, itemsize, H200)):
        assert tiling.columns & (tiling.columns - 1) == tiling.threads & (tiling.threads - 1) == 0
        assert 2 * tiling.columns <= tiling.threads <= MAX_THREADS
        assert tiling.tiles * tiling.columns * tiling.lanes >= geometry.channels
        assert (tiling.tiles - 1) * tiling.columns * tiling.lanes < max(geometry.channels, 1)
        assert tiling.positions * width == geometry.count * tiling.lanes
        assert tiling.positions_per_thread * tiling.rows * tiling.splits >= tiling.positions
        assert 1 <= tiling.splits <= 65535


@pytest.mark.parametrize(
    ("tiles", "slots", "most", "splits"),
    [
        (1, 264, 1000, 257),  # 97 % of the slots
        (1, 264, 98, 98),
        (64, 264, 1000, 4),
        (256, 264, 8, 1),
        (200, 264, 8, 5),  # 1000 blocks in four rounds of 264; 200 in one would leave a quarter idle
        (5000, 264, 8, 1),
    ],
)
def test_splits_fill_the_device(tiles: int, slots: int, most: int, splits: int) -> None:
    assert balanced_splits(tiles, slots, most) == splits


@pytest.mark.parametrize(
    ("geometry", "dtype", "kernels"),
    [
        (A_FEW_IMAGES, FLOAT32, ["gradient_whole_float32_4_1"]),
        (A_FEW_IMAGES, BFLOAT16, ["gradient_whole_bfloat16_4_1"]),
        (A_FEW_ROWS, FLOAT32, ["gradient_whole_float32_4_4"]),
        (LARGE_IMAGES, FLOAT16, ["gradient_sums_float16_8_1", "gradient_apply_float16_8_1"]),
        (LARGE_ROWS, FLOAT16, ["gradient_sums_float16_8_8", "gradient_apply_float16_8_8"]),
        (Geometry(32 * 14 * 14, 256, 1), FLOAT64, ["gradient_sums_float64_2_2", "gradient_apply_float64_2_2"]),
    ],
)
def test_a_gradient_is_one_launch_where_shared_memory_holds_a_tile(
    geometry: Geometry, dtype: np.dtype[Any], kernels: list[str]
) -> None:
    plan = launches.plan_gradient(geometry, dtype, GradAttributes(), True, H200)
    assert [launch.kernel for launch in plan.launches] == kernels
    assert all(launch.shared_bytes <= H200.shared_bytes for launch in plan.launches)
    frozen = launches.plan_gradient(geometry, dtype, GradAttributes(is_training=False), True, H200)
    assert [launch.kernel.split("_")[1] for launch in frozen.launches] == ["frozen"]


def test_the_forward_pass_keeps_one_tensor_so_larger_tiles_fit() -> None:
    geometry = Geometry(32, 128, 36 * 36)
    attributes = ForwardAttributes()
    assert len(launches.plan_forward(geometry, FLOAT32, attributes, True, H200).launches) == 1
    assert len(launches.plan_gradient(geometry, FLOAT32, GradAttributes(), True, H200).launches) == 2


@pytest.mark.parametrize("geometry", [LARGE_IMAGES, LARGE_ROWS], ids=str)
@pytest.mark.parametrize("dtype", [FLOAT16, FLOAT32], ids=str)
def test_large_arrays_keep_nearly_all_multiprocessors_busy(geometry: Geometry, dtype: np.dtype[Any]) -> None:
    plan = launches.plan_gradient(geometry, dtype, GradAttributes(), True, H200)
    for launch in plan.launches:
        assert launch.grid[0] * launch.grid[1] * launch.threads >= 0.96 * H200.num_multiprocessors * MAX_THREADS


def test_narrow_tiles_only_while_multiprocessors_are_idle() -> None:
    def best(channels: int) -> Tiling:
        return whole_tilings(Geometry(1000, channels, 1), 4, 4, H200)[0]

    assert best(64).columns == 2  # 32 bytes: what memory moves at least
    assert best(4 * 132 * 4).columns == 4
    assert best(1 << 16).columns == 32
