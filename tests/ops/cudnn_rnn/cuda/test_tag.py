"""Tags of reserve spaces: the kernels compute the polynomial."""

import struct
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from gradserve_server.devices.cuda.programs import Limits
from gradserve_server.ops.cudnn_rnn.cuda.family import ContentTags
from tests.devices.cuda.emulation.device import EmulatedDevice

KEY = np.random.default_rng(5).bytes(64)
PRIME = 2**61 - 1
BYTES = np.dtype(np.uint8)


def expected(content: NDArray[np.uint8], key: bytes) -> bytes:
    numbers = [number % PRIME for number in struct.unpack("<8Q", key)]
    values = []
    for place, mask in zip(numbers[:2], numbers[2:4], strict=True):
        value = 0
        for word in content.view("<u4")[::-1].tolist():
            value = (value + word) * place % PRIME
        values.append((value + mask) % PRIME)
    return struct.pack("<2Q", *values)


def tag(device: EmulatedDevice, content: NDArray[np.uint8], key: bytes) -> bytes:
    there, tags = device.from_host(content), [device.empty((16,), BYTES) for _ in range(2)]
    first, second = (device.address(each) for each in tags)
    ContentTags(device).start(key, device.address(there), content.nbytes, first, second)
    device.check_margins()
    assert tags[0].tobytes() == tags[1].tobytes()
    return tags[0].tobytes()


@pytest.mark.parametrize("fill", ["random", "ones", "zeros"])
@pytest.mark.parametrize("num_vectors", [1, 2, 255, 257, 4096, 9999])
def test_values(compiled: Path, num_vectors: int, fill: str) -> None:
    device = EmulatedDevice(compiled, Limits(1, 1 << 16, 3), seed=3)
    contents = {
        "random": np.frombuffer(np.random.default_rng(num_vectors).bytes(16 * num_vectors), BYTES),
        "ones": np.full(16 * num_vectors, 255, BYTES),
        "zeros": np.zeros(16 * num_vectors, BYTES),
    }
    for key in (KEY, b"\xff" * 64):
        assert tag(device, contents[fill], key) == expected(contents[fill], key)


def test_every_word_and_place_counts(compiled: Path) -> None:
    device = EmulatedDevice(compiled)
    content = np.zeros(64, BYTES)
    found = {tag(device, content, KEY)}
    for word in range(16):
        changed = content.copy()
        changed[4 * word] = 1
        found.add(tag(device, changed, KEY))
    assert len(found) == 17


def test_every_call_masks_the_value(compiled: Path) -> None:
    """Without secret numbers, contents of zeros would have tags of zeros."""
    device = EmulatedDevice(compiled)
    other = KEY[:16] + np.random.default_rng(6).bytes(48)
    assert tag(device, np.zeros(16, BYTES), KEY) != tag(device, np.zeros(16, BYTES), other)
