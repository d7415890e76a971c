"""The packed forms: golden vectors, lengths, errors, bounds, and the refusal of everything else."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies
from hypothesis.extra import numpy as arrays

from gradserve_protocol.arrays import BFLOAT16
from gradserve_protocol.codecs import CODECS, Codec, MalformedError, UnpackableError
from gradserve_protocol.codecs.codec import PIECE, RandomBits
from tests.codecs.data.make_vectors import VECTORS, value_of

ALL = list(CODECS.values())
INT8, INT4, E3M0, TOPK, BF16 = (CODECS[name] for name in ("int8", "int4", "e3m0", "topk", "bf16"))
NORMAL = np.random.default_rng(0).normal(size=1 << 20).astype(np.float32)
by_name = pytest.mark.parametrize("codec", ALL, ids=CODECS)


@pytest.mark.parametrize("vector", json.loads(VECTORS.read_text()), ids=lambda each: f"{each['codec']}-{each['size']}")
def test_golden_vectors(vector: Any) -> None:
    codec, size = CODECS[vector["codec"]], vector["size"]
    packed = np.frombuffer(bytes.fromhex(vector["packed"]), np.uint8)
    values = np.zeros(size, np.float32)
    for index, value in vector["values"].items():
        values[int(index)] = value
    assert codec.decode(packed, size).tobytes() == values.tobytes()
    own = codec.encode(np.array([value_of(index) for index in range(size)], np.float32))
    if codec is TOPK:  # whose sender chooses the scale
        kept = min(64, size)
        places = slice(4, 4 + -(-kept // 2) * 3)
        assert own[places].tobytes() == packed[places].tobytes()
    else:
        assert own.tobytes() == packed.tobytes()


@by_name
@pytest.mark.parametrize("size", [0, 1, 2, 3, 31, 32, 33, 63, 64, 65, 255, 256, 257, 4095, 4096, 4097, PIECE + 5])
def test_any_size(codec: Codec, size: int) -> None:
    packed = codec.encode(NORMAL[:size])
    assert packed.size == codec.num_bytes(size)
    decoded = codec.decode(packed, size)
    assert decoded.dtype == np.float32
    assert decoded.shape == (size,)
    pieces = [(begin, piece.copy()) for begin, piece in codec.pieces(packed, size)]
    assert b"".join(piece.tobytes() for _, piece in pieces) == decoded.tobytes()


BITS = {"bf16": 16, "int8": 8.125, "int4": 4.5, "e3m0": 4.125, "topk": 0.2265625}


@by_name
def test_bits_a_value(codec: Codec) -> None:
    assert codec.num_bytes(1 << 20) * 8 / (1 << 20) == BITS[codec.name]


ERRORS = {
    "bf16": (0.0017, 0.0017, 0.0017),
    "int8": (0.007, 0.010, 0.018),
    "int4": (0.097, 0.121, 0.143),
    "e3m0": (0.195, 0.190, 0.173),
    "topk": (0.939, 0.890, 0.835),
}
"""The relative L2 errors of values with a normal, a Laplace and a t distribution with three degrees of freedom."""


@by_name
@pytest.mark.parametrize(("index", "distribution"), [*enumerate(["normal", "laplace", "t"])])
def test_relative_errors(codec: Codec, index: int, distribution: str) -> None:
    random = np.random.default_rng(1)
    size = 1 << 20
    values = {
        "normal": lambda: random.normal(size=size),
        "laplace": lambda: random.laplace(size=size),
        "t": lambda: random.standard_t(3, size=size),
    }[distribution]()
    error = np.linalg.norm(codec.decode(codec.encode(values), size) - values) / np.linalg.norm(values)
    assert error == pytest.approx(ERRORS[codec.name][index], rel=0.08 if distribution == "t" else 0.03)


def test_stochastic_rounding_keeps_the_mean_and_is_the_same_again() -> None:
    values = NORMAL[:2048]
    rounded = [E3M0.decode(E3M0.encode(values, RandomBits(seed)), values.size) for seed in range(400)]
    assert np.linalg.norm(rounded[0] - values) / np.linalg.norm(values) == pytest.approx(0.28, rel=0.05)
    mean = np.mean(rounded, axis=0)
    assert np.linalg.norm(mean - values) / np.linalg.norm(values) < 0.28 / np.sqrt(400) * 1.2
    again, other = E3M0.encode(values, RandomBits(7)), E3M0.encode(values, RandomBits(8))
    assert again.tobytes() == E3M0.encode(values, RandomBits(7)).tobytes() != other.tobytes()


FINITE = arrays.arrays(
    np.float32,
    strategies.integers(0, 600),
    elements=strategies.floats(-60000, 60000, width=32, allow_subnormal=True) | strategies.just(-0.0),
)
BOUNDS: dict[str, Any] = {
    "bf16": lambda x, scale: np.abs(x) * 2.0**-8 + 1e-38,
    "int8": lambda x, scale: np.full(x.shape, scale * 0.502 / 127 + 1e-44),
    "int4": lambda x, scale: np.full(x.shape, scale * (0.502 / 7 + 2.0**-10) + 2.0**-24),
    "e3m0": lambda x, scale: np.maximum(np.abs(x) / 3, scale * 2.0**-7) * 1.001 + 1e-44,
    "topk": lambda x, scale: np.full(x.shape, scale),
}


@by_name
@given(values=FINITE)
def test_each_value_is_near(codec: Codec, values: Any) -> None:
    decoded = codec.decode(codec.encode(values), values.size)
    wide = values.astype(np.float64)
    for begin in range(0, values.size, codec.block_size):
        block = slice(begin, begin + codec.block_size)
        allowed = BOUNDS[codec.name](wide[block], np.abs(wide[block]).max())
        assert (np.abs(decoded[block] - wide[block]) <= allowed).all()


@by_name
def test_zeros_stay_zeros(codec: Codec) -> None:
    for zeros in (np.zeros(5000, np.float32), -np.zeros(5000, np.float32)):
        assert not codec.decode(codec.encode(zeros), 5000).any()
    one = np.zeros(5000, np.float32)
    one[77] = 8.0
    assert codec.decode(codec.encode(one), 5000).tolist() == one.tolist()


@by_name
@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16, np.float64])
def test_other_dtypes_are_float32_first(codec: Codec, dtype: Any) -> None:
    values = NORMAL[:300].astype(dtype)
    assert codec.encode(values).tobytes() == codec.encode(values.astype(np.float32)).tobytes()


@pytest.mark.parametrize("codec", [INT8, INT4, E3M0, TOPK], ids=lambda each: each.name)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e39])
def test_values_that_are_not_finite_cannot_be_packed(codec: Codec, value: float) -> None:
    with pytest.raises(UnpackableError, match="finite"):
        codec.encode(np.array([0.0, value, 1.0]))


def test_int4_has_a_greatest_magnitude() -> None:
    INT4.encode(np.array([65504.0]))
    with pytest.raises(UnpackableError, match="at most 65504"):
        INT4.encode(np.array([1.0, 7e4]))


def test_bf16_has_infinities() -> None:
    packed = BF16.encode(np.array([1.0, np.inf, -np.inf, np.nan]))
    assert str(BF16.decode(packed, 4).tolist()) == "[1.0, inf, -inf, nan]"
    assert not BF16.is_finite(packed)
    assert BF16.is_finite(BF16.encode(NORMAL))


@pytest.mark.parametrize("codec", ALL, ids=CODECS)
@given(change=strategies.data())
def test_bytes_that_are_taken_can_be_unpacked(codec: Codec, change: Any) -> None:
    """Whatever a sender changes, the bytes are refused, or they have values; and those values are finite."""
    size = change.draw(strategies.integers(1, 700))
    packed = codec.encode(NORMAL[:size])
    for _ in range(change.draw(strategies.integers(1, 3))):
        packed[change.draw(strategies.integers(0, packed.size - 1))] = change.draw(strategies.integers(0, 255))
    try:
        decoded = codec.decode(packed, size)
    except MalformedError:
        return
    assert np.isfinite(decoded).all() == codec.is_finite(packed)


def changed(codec: Codec, size: int, **places: int) -> Any:
    packed = codec.encode(NORMAL[:size])
    for place, byte in places.items():
        packed[int(place.removeprefix("at_").replace("end", "-"))] = byte
    return packed


def with_scale(codec: Codec, scale: float, dtype: str = "<f4") -> Any:
    packed = codec.encode(NORMAL[:300])
    number = np.array([scale], dtype).view(np.uint8)
    packed[: number.size] = number
    return packed


@pytest.mark.parametrize(
    ("codec", "size", "packed", "match"),
    [
        *[(each, 40, each.encode(NORMAL[:41]), "bytes for 40 values") for each in ALL],
        *[(each, 300, each.encode(NORMAL[:300])[:-1], "bytes for 300 values") for each in ALL],
        *[(each, 0, np.zeros(1, np.uint8), "expected 0 bytes") for each in ALL],
        *[
            (each, 300, with_scale(each, scale), "finite scales of at least 0")
            for each in (INT8, E3M0, TOPK)
            for scale in (np.nan, np.inf, -1.0, -0.0)
        ],
        *[(INT4, 300, with_scale(INT4, scale, "<f2"), "scales") for scale in (np.nan, np.inf, -1.0, -0.0)],
        (INT8, 3, changed(INT8, 3, at_5=0x80), "-128"),
        (INT4, 4, changed(INT4, 4, at_2=0x18), "1000"),
        (INT4, 4, changed(INT4, 4, at_2=0x81), "1000"),
        (E3M0, 4, changed(E3M0, 4, at_5=0x08), "1000"),
        (INT4, 3, changed(INT4, 3, at_3=0x11), "zeros after the last of 3"),
        (E3M0, 3, changed(E3M0, 3, at_5=0x11), "zeros after the last of 3"),
        (TOPK, 3, changed(TOPK, 3, at_4=1, at_5=0x10, at_6=0), "ascend"),
        (TOPK, 3, changed(TOPK, 3, at_4=2, at_5=0x10, at_6=0), "ascend"),
        (TOPK, 3, changed(TOPK, 3, at_7=9), "below 3"),
        (TOPK, 3, changed(TOPK, 3, at_9=1), "zeros after the last of 3"),
        (TOPK, 3, changed(TOPK, 3, at_10=0x40), "zeros after the last of 3"),
        (TOPK, 4, changed(TOPK, 4, at_10=0x02), "patterns 10"),
    ],
)
def test_refused(codec: Codec, size: int, packed: Any, match: str) -> None:
    with pytest.raises(MalformedError, match=match):
        codec.decode(packed, size)
