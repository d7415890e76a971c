"""Protobuf's wire format: the kinds of fields, and the numbers before them."""

VARINT, FIXED64, DELIMITED, FIXED32 = 0, 1, 2, 5
"""The kinds of fields, in the lowest three bits of a tag."""


def read_varint(data: bytes, position: int) -> tuple[int, int]:
    """Returns the number at a position, and the position after it.

    Raises:
        IndexError: The data end before the number does.
        ValueError: It has more than ten bytes.
    """
    value = data[position]
    position += 1
    if value < 0x80:
        return value, position
    value &= 0x7F
    for shift in range(7, 70, 7):
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise ValueError("it has a number of more than ten bytes")
