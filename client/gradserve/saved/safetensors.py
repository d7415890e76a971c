"""Files of arrays in the safetensors format: the length of a JSON header in eight bytes, the header, and the elements.

https://github.com/huggingface/safetensors describes it. The package of that name is not used: with NumPy alone it does
not read bfloat16, and what it says of a damaged file does not tell users what is wrong.
"""

import errno
import json
import math
import os
import secrets
import struct
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from gradserve_protocol.arrays import BFLOAT16, Array, DType, buffer_of

_DTYPES: dict[str, DType] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": BFLOAT16,
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"),
    "U32": np.dtype("<u4"),
    "U16": np.dtype("<u2"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_LENGTH = struct.Struct("<Q")
_MAX_HEADER_BYTES = 100_000_000
"""The longest header that the format allows."""
_METADATA = "__metadata__"
_ALIGNMENT = 8


class FormatError(ValueError):
    """A file that is not a safetensors file, or a damaged one; the message says what is wrong."""


class Contents(NamedTuple):
    """The contents of a file.

    Attributes:
        arrays: Arrays by name.
        metadata: Texts by name.
    """

    arrays: dict[str, Array]
    metadata: dict[str, str]


class _Entry(NamedTuple):
    name: str
    dtype: DType
    shape: tuple[int, ...]
    begin: int
    end: int


def write(path: Path, arrays: Mapping[str, Array], metadata: Mapping[str, str]) -> None:
    """Writes a file. Nobody ever sees a part of it: it is written beside its place, and renamed when it is complete.

    Args:
        path: The place of the file.
        arrays: Little-endian arrays in C order, by name.
        metadata: Texts by name.

    Raises:
        OSError: The file cannot be written.
    """
    # The largest elements first, so that all arrays are aligned.
    ordered = sorted(arrays.items(), key=lambda item: -item[1].dtype.itemsize)
    header: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    position = 0
    for name, array in ordered:
        end = position + array.nbytes
        header[name] = {"dtype": _NAMES[array.dtype], "shape": list(array.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    target = Path(os.path.realpath(path))  # a link stays one
    if target.exists() and not (target.is_file() or target.is_dir()):  # a device, which root could replace
        raise FileExistsError(errno.EEXIST, "not a regular file", str(target))
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}.part")
    try:
        with temporary.open("xb") as file:
            file.write(_LENGTH.pack(len(text)) + text)
            for _, array in ordered:
                file.write(buffer_of(array))
            file.flush()
            os.fsync(file.fileno())
            with suppress(FileNotFoundError):  # otherwise a new file has the permissions that the process gives
                os.fchmod(file.fileno(), target.stat().st_mode & 0o7777)
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync(target.parent)


def read(path: Path) -> Contents:
    """Reads a file.

    Raises:
        FormatError: It is not a safetensors file, or damaged.
        OSError: It cannot be read.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        entries, metadata, start = _read_header(file, size)
        arrays: dict[str, Array] = {}
        for entry in entries:
            array = np.empty(entry.shape, entry.dtype)
            file.seek(start + entry.begin)
            if file.readinto(buffer_of(array)) != array.nbytes:
                raise FormatError(f"the elements of {entry.name!r} end early")
            arrays[entry.name] = array
    return Contents(arrays, metadata)


def _read_header(file: BinaryIO, size: int) -> tuple[list[_Entry], dict[str, str], int]:
    """Returns the arrays of a file in the order of the header, its metadata, and where elements begin."""
    if size < _LENGTH.size:
        raise FormatError(f"it has {size} bytes, and no header")
    (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
    if length > min(_MAX_HEADER_BYTES, size - _LENGTH.size):
        raise FormatError("it does not begin with the length of a header: it is not a safetensors file, or ends early")
    try:
        header = json.loads(file.read(length).decode(), object_pairs_hook=_without_repetition)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"its header is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise FormatError("its header is not an object of JSON")
    metadata = header.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(each, str) for each in metadata.values()):
        raise FormatError("its metadata are not texts by name")
    entries = [_entry(name, about) for name, about in header.items()]
    position = 0
    for entry in sorted(entries, key=lambda each: (each.begin, each.end)):
        if entry.begin != position:
            raise FormatError(f"the elements of {entry.name!r} do not begin where those before it end")
        position = entry.end
    start = _LENGTH.size + length
    if size != start + position:
        raise FormatError(f"expected {start + position} bytes, got {size}")
    return entries, metadata, start


def _entry(name: str, about: Any) -> _Entry:
    try:
        dtype, shape, (begin, end) = about["dtype"], about["shape"], about["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise FormatError(f"its header does not describe {name!r}") from None
    if dtype not in _DTYPES:
        raise FormatError(f"expected a dtype out of {', '.join(_DTYPES)} for {name!r}, got {dtype}")
    if not (isinstance(shape, list) and all(map(_is_size, [*shape, begin, end]))):
        raise FormatError(f"expected sizes of at least 0 for {name!r}, got {shape} at {begin} to {end}")
    if end - begin != math.prod(shape) * _DTYPES[dtype].itemsize:
        raise FormatError(f"{name!r} has {end - begin} bytes, which is not the size of {dtype} {shape}")
    return _Entry(name, _DTYPES[dtype], tuple(shape), begin, end)


def _is_size(value: Any) -> bool:
    return type(value) is int and value >= 0


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("a name occurs twice")
    return made


def _sync(folder: Path) -> None:
    """Makes a new name in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
