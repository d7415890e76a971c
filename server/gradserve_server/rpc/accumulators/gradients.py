"""The common parts of calls with gradients: components, weights and senders, and the ids that make each count once.

Gradients of accumulators and updates of parameters come in the same messages, under other names.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Protocol, TypeAlias

import numpy as np

from gradserve_protocol.codecs import CODECS_BY_NUMBER, Codec
from gradserve_protocol.tensors import to_data_type
from gradserve_protocol.v1 import accumulator_pb2, codecs_pb2, tensor_pb2
from gradserve_server.accumulators.gradient import Contribution, Metrics, Summand, sum_of_weights
from gradserve_server.accumulators.identity import RequestId
from gradserve_server.accumulators.incoming import IncomingComponent, IncomingGradient
from gradserve_server.errors import InvalidArgumentError
from gradserve_server.limits import (
    MAX_COMPONENTS,
    MAX_DIGEST_BYTES,
    MAX_DIMENSIONS,
    MAX_ID_BYTES,
    MAX_SUMMANDS,
    MAX_UNANSWERED,
    MAX_WORKER_ID_BYTES,
    check_count,
    check_length,
)
from gradserve_server.rpc.tensors.messages import decode_tensors
from gradserve_server.security.identity import ANONYMOUS, Identity
from gradserve_server.tensors.incoming import IncomingTensor
from gradserve_server.tensors.payload import Payload

_SUMMARY_BYTES = 4096


_LONGEST_CONTENTS = 3 << 20
"""The most bytes whose contents tell calls apart. A larger gradient may arrive beside the message, and again as an
upload, of which only dtypes and shapes are known."""


class _Weighted(Protocol):
    """A request with a weight."""

    weight: float

    def HasField(self, field_name: str) -> bool:  # noqa: N802
        """Returns True if a field is set."""
        ...


class _WithDigest(Protocol):
    """A message with the digest of a worker's parameters."""

    parameters_digest: bytes


class _WithSummands(_Weighted, Protocol):
    """A request that may bring the sum of several gradients."""

    @property
    def sum_of(self) -> Sequence[accumulator_pb2.Summand]:
        """The gradients of the sum."""
        ...


class _Sent(_Weighted, Protocol):
    """A request of a worker that sends a gradient."""

    local_step: int
    worker_id: str

    @property
    def request_id(self) -> accumulator_pb2.RequestId:
        """The id of the call."""
        ...


def weight_of(request: _Weighted) -> float:
    """Returns the weight of a gradient, which is 1 unless the request says otherwise."""
    return request.weight if request.HasField("weight") else 1.0


def contribution_of(
    request: _Sent,
    *,
    was_accepted: bool = False,
    sum_of: tuple[Summand, ...] = (),
    epoch: int | None = None,
    digest: bytes = b"",
    metrics: Metrics = (),
) -> Contribution:
    """Reads the step, weight and sender of a gradient.

    Args:
        request: The request.
        was_accepted: Whether an earlier run of the server has accepted the gradient, so that its step does not matter.
        sum_of: The gradients of a sum.
        epoch: The epoch of a gradient for a sharded accumulator, if the request says it.
        digest: The digest of the worker's parameters, if the request has it.
        metrics: What the worker of an update has measured.

    Raises:
        InvalidArgumentError: The sender's id is too long.
    """
    check_length(request.worker_id, MAX_WORKER_ID_BYTES, "worker_id")
    return Contribution(
        local_step=request.local_step,
        weight=sum_of_weights([each.weight for each in sum_of]) if sum_of else weight_of(request),
        worker_id=request.worker_id,
        sequence=request.request_id.sequence,
        sum_of=sum_of,
        epoch=epoch,
        was_accepted=was_accepted,
        parameters_digest=digest,
        metrics=metrics,
    )


def _no_metrics(metrics: Mapping[str, float], field: str) -> Metrics:
    if metrics:
        raise InvalidArgumentError("expected no metrics of a gradient, which is no update of parameters", field=field)
    return ()


DecodeMetrics: TypeAlias = Callable[[Mapping[str, float], str], Metrics]
"""Reads metrics, given their field."""


def summands_of(
    request: _WithSummands, user: Identity, decode_metrics: DecodeMetrics = _no_metrics
) -> tuple[Summand, ...]:
    """Reads the gradients of a sum; none of a single gradient.

    Args:
        request: The request.
        user: The caller.
        decode_metrics: Reads what the worker of each has measured.

    Raises:
        InvalidArgumentError: They are too many, an id is not valid, or there is another weight beside theirs.
    """
    if not request.sum_of:
        return ()
    check_count(request.sum_of, MAX_SUMMANDS, "gradients", "sum_of")
    if request.HasField("weight"):
        raise InvalidArgumentError("expected no weight beside those of sum_of, got one", field="weight")
    found = enumerate(request.sum_of)
    return tuple([_summand(each, f"sum_of[{index}]", user, decode_metrics) for index, each in found])


def _summand(message: accumulator_pb2.Summand, field: str, user: Identity, decode_metrics: DecodeMetrics) -> Summand:
    check_length(message.worker_id, MAX_WORKER_ID_BYTES, f"{field}.worker_id")
    return Summand(
        message.weight if message.HasField("weight") else 1.0,
        message.worker_id,
        decode_request_id(message.request_id, b"", user, field) if message.HasField("request_id") else None,
        digest_of(message, message.worker_id, f"{field}.parameters_digest"),
        decode_metrics(message.metrics, f"{field}.metrics"),
    )


def digest_of(message: _WithDigest, worker_id: str, field: str) -> bytes:
    """Reads the digest of a worker's parameters; empty if there is none.

    Raises:
        InvalidArgumentError: It is too long, or the worker has no id.
    """
    digest = message.parameters_digest
    if len(digest) > MAX_DIGEST_BYTES:
        raise InvalidArgumentError(f"expected at most {MAX_DIGEST_BYTES} bytes, got {len(digest)}", field=field)
    if digest and not worker_id:
        raise InvalidArgumentError("expected a digest of parameters with a worker_id, got one without", field=field)
    return digest


def serialized(summands: Iterable[accumulator_pb2.Summand]) -> list[bytes]:
    """Returns the gradients of a sum as a part of its fingerprint."""
    return [each.SerializeToString(deterministic=True) for each in summands]


def incoming_gradient(
    parts: Sequence[accumulator_pb2.ComponentGradient],
    payload: Payload,
    user: Identity = ANONYMOUS,
    *,
    release: bool = False,
    path: str = "gradient",
    may_be_packed: bool = False,
) -> IncomingGradient:
    """Reads the components of a gradient.

    Args:
        parts: Their messages.
        payload: The payload beside the request.
        user: The caller, who can only refer to tensors within reach.
        release: Whether to delete its stored tensors once it is accepted or dropped.
        path: The field of the components in the request.
        may_be_packed: Whether components may be packed with a codec.

    Raises:
        InvalidArgumentError: They are too many, one has too many dimensions, or is packed as none may be.
    """
    check_count(parts, MAX_COMPONENTS, "components", path)
    described: list[tuple[str, tensor_pb2.Tensor]] = []
    kinds: list[tuple[str, str | None, tuple[int, ...] | None, Codec | None]] = []
    for index, part in enumerate(parts):
        kind, dense_shape, codec = part.WhichOneof("value"), None, None
        if kind == "dense":
            described.append((f"{path}[{index}].dense", part.dense))
        elif kind == "sparse":
            sparse, field = part.sparse, f"{path}[{index}].sparse"
            described += [(f"{field}.indices", sparse.indices), (f"{field}.values", sparse.values)]
            if sparse.HasField("dense_shape"):
                dims = sparse.dense_shape.dims
                check_count(dims, MAX_DIMENSIONS, "dimensions", f"{field}.dense_shape.dims")
                dense_shape = tuple(dims)
        elif kind == "packed":
            codec = _codec_of(part.packed, f"{path}[{index}].packed", may_be_packed=may_be_packed)
            described.append((f"{path}[{index}].packed.data", part.packed.data))
        kinds.append((part.name, kind, dense_shape, codec))
    tensors = decode_tensors(described, payload, user)
    rest = iter(tensors)
    components = [
        IncomingComponent(
            name,
            indices=next(rest) if kind == "sparse" else None,
            value=None if kind is None else next(rest),
            dense_shape=dense_shape,
            codec=codec,
        )
        for name, kind, dense_shape, codec in kinds
    ]
    return IncomingGradient(components, tensors, release, path)


def _codec_of(packed: codecs_pb2.PackedTensor, field: str, *, may_be_packed: bool) -> Codec:
    """Returns the codec of a packed component.

    Raises:
        InvalidArgumentError: It may not be packed, or the codec is not known.
    """
    if not may_be_packed:
        raise InvalidArgumentError(
            "expected a dense or a sparse value, got a packed one: only single updates of parameters may be packed",
            field=field,
        )
    codec = CODECS_BY_NUMBER.get(packed.codec)
    if codec is None:
        raise InvalidArgumentError(f"expected a known codec, got {packed.codec}", field=f"{field}.codec")
    return codec


# Ids of calls


def gradient_id(
    message: accumulator_pb2.RequestId,
    what: tuple[object, ...],
    given: IncomingGradient,
    user: Identity = ANONYMOUS,
    *,
    unread: bool = False,
    more: Iterable[bytes] = (),
) -> RequestId:
    """Returns the id of a call with a gradient.

    Its fingerprint covers everything that a caller repeats when it sends a gradient again; not handles, which change
    when the gradient is uploaded again.

    Args:
        message: The id in the request.
        what: The other fields that are repeated, whose texts tell calls apart.
        given: The gradient.
        user: The caller.
        unread: Whether the elements of the gradient do not count.
        more: More of what is repeated.
    """
    digest = blake2b(repr(what).encode(), digest_size=16)
    for each in more:
        digest.update(each)
    _add_gradient(digest, given, unread=unread)
    return decode_request_id(message, digest.digest(), user)


def _add_gradient(digest: blake2b, gradient: IncomingGradient, *, unread: bool) -> None:
    # What came with the request, beside the message or in it.
    num_bytes = 0
    for each in gradient.tensors:
        if each.array is not None and not each.is_on_gpu:
            num_bytes += each.array.nbytes
    by_contents = not unread and num_bytes <= _LONGEST_CONTENTS
    for component in gradient.components:
        digest.update(component.name.encode() + b"\0")
        if component.codec is not None:
            digest.update(component.codec.name.encode() + b"\0")
        if component.indices is not None:
            _add_tensor(digest, component.indices, by_contents=by_contents)
        if component.value is not None:
            _add_tensor(digest, component.value, by_contents=by_contents)
        if component.indices is not None:
            digest.update(repr(component.dense_shape).encode())


def _add_tensor(digest: blake2b, tensor: IncomingTensor, *, by_contents: bool) -> None:
    """Adds what very probably differs for different contents, fast even for megabytes: both ends, and all folded."""
    array = tensor.array
    if array is None:
        digest.update(repr(tensor.spec if tensor.fault is None else tensor.fault).encode())
        return
    digest.update(repr((int(to_data_type(array.dtype)), array.shape)).encode())
    if not by_contents or tensor.is_on_gpu:
        return
    content = array.reshape(-1).view(np.uint8)
    if content.size <= 2 * _SUMMARY_BYTES:
        digest.update(content.data)
        return
    words = content.size // 8
    digest.update(content[:_SUMMARY_BYTES].data)
    digest.update(content[-_SUMMARY_BYTES:].data)
    digest.update(np.bitwise_xor.reduce(content[: words * 8].view(np.uint64)).tobytes())


def decode_request_id(
    message: accumulator_pb2.RequestId, fingerprint: bytes, user: Identity = ANONYMOUS, within: str = ""
) -> RequestId:
    """Reads the id of a call.

    Args:
        message: The id in the request.
        fingerprint: The digest of the call's content.
        user: The caller.
        within: The field of the message that has the id; empty for the request itself.

    Raises:
        InvalidArgumentError: It is empty or too long, or names too many other calls.
    """
    field = f"{within}.request_id" if within else "request_id"
    check_length(message.client_id, MAX_ID_BYTES, f"{field}.client_id")
    check_count(message.unanswered, MAX_UNANSWERED, "numbers", f"{field}.unanswered")
    since = message.unanswered_since if message.HasField("unanswered_since") else None
    if not message.client_id:
        raise InvalidArgumentError("expected a client_id, got an empty one", field=f"{field}.client_id")
    return RequestId(user.own(message.client_id), message.sequence, fingerprint, frozenset(message.unanswered), since)
