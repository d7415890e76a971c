"""Sums of FusedBatchNorm on the host are within the bounds that its documentation gives, whatever is added up."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from gradserve_protocol.memory.pool import BufferPool
from gradserve_server.devices.device import CpuDevice
from gradserve_server.devices.host.kernels import ForkJoin
from gradserve_server.ops.batch_norm.cpu import CpuBatchNorm
from tests.ops.batch_norm.accuracy import HARD, assert_sums_within_bounds

NOT_OF_HALF_RANGE = ("huge", "tiny", "few digits", "outlier", "large first", "small first")
"""What float16 does not have."""


@pytest.fixture(scope="module")
def kernels(parallel: ForkJoin, _compiled_kernels: None) -> CpuBatchNorm:
    made = by_numpy(parallel)
    made.prepare(lambda: False)
    return made


def by_numpy(parallel: ForkJoin) -> CpuBatchNorm:
    return CpuBatchNorm(CpuDevice(BufferPool(1 << 26)), parallel)


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [np.float32, np.float64, ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("data_format", ["NHWC", "NCHW"])
@pytest.mark.parametrize("name", HARD)
def test_sums_are_within_their_bounds(
    kernels: CpuBatchNorm, parallel: ForkJoin, dtype: Any, data_format: str, name: str
) -> None:
    if dtype is np.float16 and name.startswith(NOT_OF_HALF_RANGE):
        pytest.skip("not float16")
    assert_sums_within_bounds(kernels, np.dtype(dtype), data_format, name)
    assert_sums_within_bounds(by_numpy(parallel), np.dtype(dtype), data_format, name, is_numpy=True)
