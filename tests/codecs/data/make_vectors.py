"""Writes vectors.json: packed forms and their values, by a plain reading of `codecs.proto`, one value at a time.

python -m tests.codecs.data.make_vectors

Knows nothing of the codecs of the project, nor of NumPy. Each vector packs the values of `value_of`.
"""

import json
import struct
from collections.abc import Callable
from pathlib import Path

SIZES = (1, 2, 7, 31, 33, 64, 65, 255, 257, 300)
SIZES_OF_TOPK = (1, 2, 3, 63, 64, 65, 4097, 4164)
VECTORS = Path(__file__).with_name("vectors.json")


def value_of(index: int) -> float:
    """Returns the value at an index: magnitudes up to 157, all different, and exact in float32; signs alternate."""
    magnitude = ((index * 7919) % 10007 + 1) / 64
    return -magnitude if index % 2 else magnitude


def f32(number: float) -> float:
    """Rounds a number to float32."""
    rounded: float = struct.unpack("<f", struct.pack("<f", number))[0]
    return rounded


def f16(number: float) -> float:
    """Rounds a number to float16."""
    rounded: float = struct.unpack("<e", struct.pack("<e", number))[0]
    return rounded


def nibbles(numbers: list[int]) -> bytes:
    """Returns numbers of 4 bits, two in a byte."""
    padded = [*numbers, *([0] * (len(numbers) % 2))]
    return bytes(low | high << 4 for low, high in zip(padded[::2], padded[1::2], strict=True))


def bf16(values: list[float]) -> tuple[bytes, list[float]]:
    packed, unpacked = b"", []
    for value in values:
        (bits,) = struct.unpack("<I", struct.pack("<f", value))
        upper, lower = bits >> 16, bits & 0xFFFF
        if lower > 0x8000 or (lower == 0x8000 and upper & 1):
            upper += 1
        packed += struct.pack("<H", upper)
        unpacked.append(struct.unpack("<f", struct.pack("<I", upper << 16))[0])
    return packed, unpacked


def in_blocks(
    size: int, block: Callable[[list[float]], tuple[bytes, list[float]]]
) -> Callable[[list[float]], tuple[bytes, list[float]]]:
    def pack(values: list[float]) -> tuple[bytes, list[float]]:
        packed, unpacked = b"", []
        for begin in range(0, len(values), size):
            more, those = block(values[begin : begin + size])
            packed += more
            unpacked += those
        return packed, unpacked

    return pack


def int8(values: list[float]) -> tuple[bytes, list[float]]:
    scale = max(map(abs, values))
    numbers = [round(f32(f32(value / scale) * 127)) for value in values]
    unpacked = [f32(f32(number / 127) * scale) for number in numbers]
    return struct.pack(f"<f{len(numbers)}b", scale, *numbers), unpacked


def int4(values: list[float]) -> tuple[bytes, list[float]]:
    scale = f16(max(map(abs, values)))
    numbers = [min(max(round(f32(f32(value / scale) * 7)), -7), 7) for value in values]
    unpacked = [f32(f32(number / 7) * scale) for number in numbers]
    return struct.pack("<e", scale) + nibbles([number & 15 for number in numbers]), unpacked


def e3m0(values: list[float]) -> tuple[bytes, list[float]]:
    scale = max(map(abs, values))
    parts = [0.0, *[2.0 ** (level - 7) for level in range(1, 8)]]
    numbers, unpacked = [], []
    for value in values:
        # The nearest level; of two, the greater one.
        level = max(range(8), key=lambda level: (-abs(f32(abs(value) / scale) - parts[level]), level))
        numbers.append(level | (8 if value < 0 and level else 0))
        unpacked.append((-1 if value < 0 else 1) * f32(parts[level] * scale) if level else 0.0)
    return struct.pack("<f", scale) + nibbles(numbers), unpacked


def topk(values: list[float]) -> tuple[bytes, list[float]]:
    kept = sorted(sorted(range(len(values)), key=lambda index: -abs(values[index]))[:64])
    scale = f32(max(map(abs, values)) * 0.75)
    numbers = [0 if abs(values[index]) < scale / 2 else 3 if values[index] < 0 else 1 for index in kept]
    packed = struct.pack("<f", scale)
    pairs = [*kept, *([0] * (len(kept) % 2))]
    for first, second in zip(pairs[::2], pairs[1::2], strict=True):
        packed += (first | second << 12).to_bytes(3, "little")
    fours = [*numbers, *([0] * (-len(numbers) % 4))]
    for begin in range(0, len(fours), 4):
        packed += bytes([sum(number << 2 * place for place, number in enumerate(fours[begin : begin + 4]))])
    unpacked = [0.0] * len(values)
    for index, number in zip(kept, numbers, strict=True):
        unpacked[index] = {0: 0.0, 1: scale, 3: -scale}[number]
    return packed, unpacked


CODECS = {
    "bf16": (bf16, SIZES),
    "int8": (in_blocks(256, int8), SIZES),
    "int4": (in_blocks(32, int4), SIZES),
    "e3m0": (in_blocks(256, e3m0), SIZES),
    "topk": (in_blocks(4096, topk), SIZES_OF_TOPK),
}


def main() -> None:
    """Writes the file."""
    vectors = []
    for name, (pack, sizes) in CODECS.items():
        for size in sizes:
            packed, unpacked = pack([value_of(index) for index in range(size)])
            vector: dict[str, object] = {"codec": name, "size": size, "packed": packed.hex()}
            vector["values"] = {str(index): value for index, value in enumerate(unpacked) if value}
            vectors.append(vector)
    lines = ",\n".join(map(json.dumps, vectors))
    VECTORS.write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
