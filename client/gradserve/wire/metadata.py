"""The metadata of a call: over gRPC its own, on a socket behind the method's name."""

from typing import TypeAlias

from gradserve.wire.frames import MAX_NAME_BYTES

Metadata: TypeAlias = tuple[tuple[str, str], ...]
"""Keys in lower case, and values, in visible ASCII and spaces."""


def name_with(name: bytes, metadata: Metadata) -> bytes:
    """Returns the name of a CALL with as much of the metadata as there is room for, in its order."""
    for key, value in metadata:
        longer = b"%b\n%b:%b" % (name, key.encode(), value.encode())
        if len(longer) > MAX_NAME_BYTES:
            break
        name = longer
    return name


def split_name(name: bytes) -> tuple[bytes, dict[str, str]]:
    """Returns the method of a CALL's name, and the metadata behind it; ignores what is not metadata."""
    method, *lines = name.split(b"\n")
    metadata = {}
    for line in lines:
        key, colon, value = line.partition(b":")
        if colon and value.isascii() and key.isascii():
            metadata[key.decode()] = value.decode()
    return method, metadata
