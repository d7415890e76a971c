"""The data that CudnnRNN leaves for CudnnRNNBackprop: a header that describes it, and the part that the device saved.

reserve_space has the dtype of the call's floats; its first 128 bytes are the header, and the rest is in the device's
layout. host_reserved is the header alone, as int8. Both travel through clients, so they are not trusted. The header
ends with a tag, which only the run of the server that made it can compute: data that clients alter or make up never
reaches cuDNN, which may use parts of it as positions in memory.
"""

import dataclasses
import hashlib
import hmac
import json
import secrets
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradserve_server.devices.device import Array
from gradserve_server.errors import InvalidArgumentError
from gradserve_server.ops.cudnn_rnn.spec import HEADER_BYTES, Problem

TAG_BYTES = 32
TAG_START = HEADER_BYTES - TAG_BYTES
CONTENT_KEY_BYTES = 64

_MAGIC = b"gsrnn\r\n\0"
_VERSION = 3
_HEADER = struct.Struct(f"<8sQ16s16s16s32s{TAG_BYTES}s")
"""Magic, version, device, digest of the problem and the lengths of its sequences, ids of the forward call and of the
run of the server, tag."""
_KEY_BYTES = 32
_CALL_ID_BYTES = 16
_RUN_BYTES = 32


class ReserveKey:
    """The secret by which one run of a server knows its own reserve spaces. Safe to use from several threads.

    A tag is a message authentication code: of the header by a key that BLAKE2b derives from the secret for each call,
    and of the content by whatever code suits the device, with that key. So a key of a code authenticates one content.
    """

    def __init__(self, random: Callable[[int], bytes] = secrets.token_bytes) -> None:
        """`random` returns a number of random bytes."""
        self._random = random
        self._key = random(_KEY_BYTES)
        self._run = self._derived(b"run", b"", _RUN_BYTES)

    def new_header(self, device: str, problem: Problem, lengths: NDArray[Any]) -> NDArray[np.int8]:
        """Returns the header for a forward call, with a tag of zeros.

        Args:
            device: The name of the layout, at most 16 ASCII characters. Devices of the same name can read each other's
                data.
            problem: The problem of the call.
            lengths: The lengths of its sequences, [B].
        """
        made_on, digest = _device_bytes(device), _digest(problem, lengths)
        call_id = self._random(_CALL_ID_BYTES)
        packed = _HEADER.pack(_MAGIC, _VERSION, made_on, digest, call_id, self._run, bytes(TAG_BYTES))
        return np.frombuffer(packed, np.int8).copy()

    def content_key(self, header: NDArray[Any]) -> bytes:
        """Returns the key of 64 bytes with which the content behind a header is authenticated, whatever its tag."""
        return self._derived(b"content", header.tobytes()[:TAG_START], CONTENT_KEY_BYTES)

    def check_header(
        self,
        device: str,
        problem: Problem,
        lengths: NDArray[Any],
        num_bytes: int,
        reserve_space: Array,
        header: NDArray[Any],
        host_reserved: NDArray[Any] | None,
    ) -> None:
        """Checks what the headers of a backward call claim; `check_tag` checks whether the claims are true.

        Args:
            device: See `new_header`.
            problem: The problem of the backward call.
            lengths: The lengths of its sequences, [B].
            num_bytes: The number of bytes that the device saves behind the header.
            reserve_space: Only its shape is read.
            header: The first 128 bytes of reserve_space, or all of it if it is shorter, in host memory.
            host_reserved: int8, in host memory; None if it is not available.

        Raises:
            InvalidArgumentError: They are not from a forward call for the same problem, on the same kind of device and
                in this run of the server; the message names the wrong input and the reason.
        """
        digest = _digest(problem, lengths)
        self._check(device, digest, header.tobytes(), "reserve_space")
        expected = (reserve_length(problem, num_bytes),)
        if tuple(reserve_space.shape) != expected:
            raise _wrong("reserve_space", f"expected shape {list(expected)}, got {list(reserve_space.shape)}")
        if host_reserved is None:
            return
        if host_reserved.shape != (HEADER_BYTES,):
            raise _wrong("host_reserved", f"expected shape [{HEADER_BYTES}], got {list(host_reserved.shape)}")
        self._check(device, digest, host_reserved.tobytes(), "host_reserved")
        if host_reserved.tobytes() != header.tobytes():
            raise _wrong("host_reserved", "it comes from another call than reserve_space")

    def _check(self, device: str, digest: bytes, header: bytes, field: str) -> None:
        if len(header) != HEADER_BYTES:
            raise _wrong(field, f"expected at least {HEADER_BYTES} bytes, got {len(header)}")
        magic, version, made_on, found, _, run, _ = _HEADER.unpack(header)
        if magic != _MAGIC:
            raise _wrong(field, "it does not begin with the header of one")
        if version != _VERSION:
            raise _wrong(field, f"expected version {_VERSION} of the format, got {version}")
        if made_on != _device_bytes(device):
            given = made_on.rstrip(b"\0").decode("ascii", "backslashreplace")
            raise _wrong(field, f"expected one made on {device}, got one made on {given}")
        if run != self._run:
            raise _wrong(field, "it comes from another server, or from before this one was restarted")
        if found != digest:
            raise _wrong(field, "it comes from a call with other attributes, dtype, shapes or sequence_lengths")

    def _derived(self, purpose: bytes, data: bytes, num_bytes: int) -> bytes:
        return hashlib.blake2b(data, key=self._key, person=purpose, digest_size=num_bytes).digest()


def check_tag(header: NDArray[Any], tag: bytes) -> None:
    """Checks the tag in a header.

    Args:
        header: The header, in host memory, which `ReserveKey.check_header` has checked.
        tag: The tag of the content that was given, of up to 32 bytes; zeros are appended.

    Raises:
        InvalidArgumentError: They differ.
    """
    if not hmac.compare_digest(header.tobytes()[TAG_START:], tag.ljust(TAG_BYTES, b"\0")):
        raise _wrong("reserve_space", "its content was changed")


def reserve_length(problem: Problem, num_bytes: int) -> int:
    """Returns the number of elements of a reserve_space with `num_bytes` behind the header."""
    return -(-(HEADER_BYTES + num_bytes) // problem.dtype.itemsize)


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
