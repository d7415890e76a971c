"""Sums of packed updates: the bits of unpacking first, with and without kernels, on any number of threads."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from gradserve_protocol.codecs import CODECS, Codec
from gradserve_server.accumulators.gradient import Packed
from gradserve_server.devices.host.kernels import ForkJoin
from gradserve_server.parameters.unpacking.adder import Addition, PackedAdder

SIZES = (0, 1, 2, 31, 33, 63, 65, 255, 257, 4095, 4097, 20_001)
CHUNK = 1 << 13


@pytest.fixture(scope="module", params=[(1, True), (2, True), (2, False)], ids=["one thread", "two", "NumPy"])
def adder(request: pytest.FixtureRequest, _compiled_kernels: None) -> Iterator[PackedAdder]:
    num_threads, is_compiled = request.param
    parallel = ForkJoin(num_threads)
    made = PackedAdder(parallel, chunk_elements=CHUNK)
    if is_compiled:
        made.prepare(lambda: False)
    yield made
    parallel.close()


@pytest.mark.parametrize("codec", CODECS.values(), ids=list(CODECS))
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("factor", [1.0, 0.3])
def test_the_bits_of_unpacking_first(adder: PackedAdder, codec: Codec, dtype: Any, factor: float) -> None:
    random = np.random.default_rng(2)
    additions, expected = [], []
    for size in SIZES:
        packed = Packed(codec, codec.encode(random.normal(size=size)), (size,))
        unpacked = codec.decode(packed.data, size).astype(dtype) * dtype(factor)
        for is_first in (True, False):
            total = random.normal(size=size).astype(dtype)
            total[::3] = -0.0
            expected.append(unpacked if is_first else total + unpacked)
            additions.append(Addition(packed, total, is_first))
    adder.add(additions, factor)
    for addition, values in zip(additions, expected, strict=True):
        assert addition.total.tobytes() == values.tobytes()
