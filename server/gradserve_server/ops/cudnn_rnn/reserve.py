"""The data that CudnnRNN leaves for CudnnRNNBackprop: a header that describes it, and the part that the device saved.

reserve_space has the dtype of the call's floats; its first 64 bytes are the header, and the rest is in the device's
layout. host_reserved is the header alone, as int8. Both travel through clients, so they are not trusted: length and
header are checked before anything is read, and the rest is numbers to compute with, never positions.
"""

import dataclasses
import hashlib
import json
import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradserve_server.devices.device import Array
from gradserve_server.errors import InvalidArgumentError
from gradserve_server.ops.cudnn_rnn.spec import HEADER_BYTES, Problem

CALL_ID_BYTES = 16

_MAGIC = b"gsrnn\r\n\0"
_VERSION = 2
_HEADER = struct.Struct("<8sQ16s16s16s")
"""Magic, version, device, digest of the problem and the lengths of its sequences, id of the forward call."""


def make_header(device: str, problem: Problem, lengths: NDArray[Any], call_id: bytes) -> NDArray[np.int8]:
    """Returns the header for a forward call.

    Args:
        device: The name of the layout, at most 16 ASCII characters. Devices of the same name can read each other's
            data.
        problem: The problem of the call.
        lengths: The lengths of its sequences, [B].
        call_id: 16 random bytes.
    """
    assert len(call_id) == CALL_ID_BYTES
    packed = _HEADER.pack(_MAGIC, _VERSION, _device_bytes(device), _digest(problem, lengths), call_id)
    return np.frombuffer(packed, np.int8).copy()


def reserve_length(problem: Problem, num_bytes: int) -> int:
    """Returns the number of elements of a reserve_space with `num_bytes` behind the header."""
    return -(-(HEADER_BYTES + num_bytes) // problem.dtype.itemsize)


def check(
    device: str,
    problem: Problem,
    lengths: NDArray[Any],
    num_bytes: int,
    reserve_space: Array,
    header: NDArray[Any],
    host_reserved: NDArray[Any] | None,
) -> None:
    """Checks that a backward call's inputs are from a forward call for the same problem on the same kind of device.

    Args:
        device: See `make_header`.
        problem: The problem of the backward call.
        lengths: The lengths of its sequences, [B].
        num_bytes: The number of bytes that the device saves behind the header.
        reserve_space: Only its shape is read.
        header: The first 64 bytes of reserve_space, or all of it if it is shorter, in host memory.
        host_reserved: int8, in host memory; None if it is not available.

    Raises:
        InvalidArgumentError: They are not; the message has the wrong input, and the reason.
    """
    digest = _digest(problem, lengths)
    call_id = _check_header(device, digest, header.tobytes(), "reserve_space")
    expected = (reserve_length(problem, num_bytes),)
    if tuple(reserve_space.shape) != expected:
        raise _wrong("reserve_space", f"expected shape {list(expected)}, got {list(reserve_space.shape)}")
    if host_reserved is None:
        return
    if host_reserved.shape != (HEADER_BYTES,):
        raise _wrong("host_reserved", f"expected shape [{HEADER_BYTES}], got {list(host_reserved.shape)}")
    if _check_header(device, digest, host_reserved.tobytes(), "host_reserved") != call_id:
        raise _wrong("host_reserved", "it comes from another call than reserve_space")


def _check_header(device: str, digest: bytes, header: bytes, field: str) -> bytes:
    """Returns the id of the forward call."""
    if len(header) != HEADER_BYTES:
        raise _wrong(field, f"expected at least {HEADER_BYTES} bytes, got {len(header)}")
    magic, version, made_on, found, call_id = _HEADER.unpack(header)
    if magic != _MAGIC:
        raise _wrong(field, "it does not begin with the header of one")
    if version != _VERSION:
        raise _wrong(field, f"expected version {_VERSION} of the format, got {version}")
    if made_on != _device_bytes(device):
        given = made_on.rstrip(b"\0").decode("ascii", "backslashreplace")
        raise _wrong(field, f"expected one made on {device}, got one made on {given}")
    if found != digest:
        raise _wrong(field, "it comes from a call with other attributes, dtype, shapes or sequence_lengths")
    return bytes(call_id)


def _wrong(field: str, what: str) -> InvalidArgumentError:
    text = f"{field} must be as CudnnRNN returned it with is_training=true for the same inputs and attributes: {what}"
    return InvalidArgumentError(text, field=field)


def _device_bytes(device: str) -> bytes:
    name = device.encode("ascii")
    assert len(name) <= 16, device
    return name.ljust(16, b"\0")


def _digest(problem: Problem, lengths: NDArray[Any]) -> bytes:
    """Returns a digest of everything that determines the meaning of the saved bytes: not the order of dimensions."""
    network = {**dataclasses.asdict(problem.network), "mode": problem.network.mode.value}
    meaning = (
        network,
        problem.dtype.name,
        problem.max_seq_length,
        problem.batch,
        float(problem.dropout),
        int(problem.seed),
        lengths.tolist(),
    )
    return hashlib.blake2b(json.dumps(meaning, sort_keys=True).encode(), digest_size=16).digest()
