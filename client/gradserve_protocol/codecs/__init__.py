"""Codecs: packed forms of arrays of floating-point numbers, in which updates and versions of parameters can travel.

A codec packs the values of an array, in its order, into bytes: a one-dimensional array of uint8, so that it travels in
every way in which tensors do. Its shape and dtype are known from elsewhere. Packed values are float32: those of a
float64 array are rounded first. `codecs.proto` specifies the bytes.

These classes are the reference: NumPy, without a loop over elements. `CODECS` has one of each. The server adds packed
updates up with kernels that give the same bits.
"""

from collections.abc import Mapping

from gradserve_protocol.codecs.blocks import E3M0, Bfloat16, Int4, Int8
from gradserve_protocol.codecs.codec import Codec, MalformedError, UnpackableError
from gradserve_protocol.codecs.topk import TopK

__all__ = ["CODECS", "CODECS_BY_NUMBER", "Codec", "MalformedError", "UnpackableError"]

CODECS: Mapping[str, Codec] = {codec.name: codec for codec in (Bfloat16(), Int8(), Int4(), E3M0(), TopK())}
"""The codecs, by name."""
CODECS_BY_NUMBER: Mapping[int, Codec] = {codec.number: codec for codec in CODECS.values()}
"""The codecs, by the numbers that messages have for them."""
