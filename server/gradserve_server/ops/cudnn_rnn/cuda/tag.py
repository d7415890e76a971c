"""The tag of a reserve space in a GPU's memory: kernels that compute it there, in one pass over the content."""

import functools
import struct
from importlib import resources
from typing import Protocol

from gradserve_server.devices.cuda.programs import (
    ELEMENT_THREADS,
    CompiledProgram,
    Launch,
    Limits,
    Program,
    Struct,
    element_launch,
    element_sources,
    instance,
)

CONTENT_TAG_BYTES = 16
WORDS_BYTES = 16
"""The kernels read so many bytes at a time."""

_PRIME = (1 << 61) - 1
_PLACES = 2
_ARGUMENTS = {
    "reserve_sums": Struct(("content", "partial_sums"), ("count", "key_0", "key_1", "stride_0", "stride_1")),
    "reserve_tag": Struct(("partial_sums", "tag", "second_tag"), ("blocks", "mask_0", "mask_1")),
}
_SHARED_BYTES = _PLACES * ELEMENT_THREADS * 8


class TagDevice(Protocol):
    """The part of a `KernelDevice` that tags need. Safe to use from several threads."""

    @property
    def limits(self) -> Limits:
        """The properties that decide how work is cut into blocks."""
        ...

    def scratch(self, num_bytes: int) -> int:
        """Returns the address of this thread's scratch memory, which its next kernels may overwrite."""
        ...

    def compiled(self, program: Program) -> CompiledProgram:
        """Returns a program for this device."""
        ...


class ContentTags:
    """Computes tags on a device. Safe to use from several threads.

    A tag is the value of a polynomial, whose coefficients are the words of the content, at two secret places, plus two
    secret numbers, modulo 2^61 - 1 (a code of Wegman and Carter). Whoever sees the tag of one content of n words has a
    chance of (n / 2^61)^2 to guess that of another one, however it is made: 2^-64 for 2 GiB.
    """

    def __init__(self, device: TagDevice) -> None:
        """Takes the device that has the contents."""
        self._device = device

    def start(self, key: bytes, content: int, num_bytes: int, tag: int, second_tag: int) -> None:
        """Starts to compute a tag after everything that this thread started before.

        Args:
            key: 64 bytes, which authenticate one content only.
            content: The address of the content, a multiple of 16.
            num_bytes: Its size, a multiple of 16, more than 0.
            tag: The address for the tag, of 16 bytes.
            second_tag: Where it is written as well.

        Raises:
            MemoryError: There is not enough memory.
        """
        assert content % WORDS_BYTES == num_bytes % WORDS_BYTES == 0 < num_bytes
        keys = [number % _PRIME for number in struct.unpack_from(f"<{2 * _PLACES}Q", key)]
        count = num_bytes // WORDS_BYTES
        sums = element_launch("reserve_sums", count, self._device.limits)
        sums = Launch(sums.kernel, sums.grid, sums.threads, _SHARED_BYTES)
        blocks = sums.grid[0]
        words_of_all_threads = WORDS_BYTES // 4 * blocks * sums.threads
        addresses = {
            "content": content,
            "partial_sums": self._device.scratch(8 * _PLACES * blocks),
            "tag": tag,
            "second_tag": second_tag,
        }
        numbers = {"count": count, "blocks": blocks}
        for place in range(_PLACES):
            numbers[f"key_{place}"] = keys[place]
            numbers[f"stride_{place}"] = pow(keys[place], words_of_all_threads, _PRIME)
            numbers[f"mask_{place}"] = keys[_PLACES + place]
        compiled = self._device.compiled(program())
        for launch in (sums, Launch("reserve_tag", (1, 1), ELEMENT_THREADS, _SHARED_BYTES)):
            compiled.launch(launch, _ARGUMENTS[launch.kernel].of(addresses, numbers))


@functools.cache
def program() -> Program:
    """Returns the program of the kernels."""
    instances = [
        instance(kernel, str(ELEMENT_THREADS), f"{kernel.title().replace('_', '')}Arguments", f"{kernel}_of")
        for kernel in _ARGUMENTS
    ]
    parts = [*element_sources(), (resources.files(__package__) / "tag.cu").read_text(encoding="utf-8")]
    return Program("tags of reserve spaces", "\n".join([*parts, *instances]), tuple(_ARGUMENTS))
