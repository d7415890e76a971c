"""Packs updates and unpacks versions, and keeps the errors of packed updates for later ones."""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import numpy as np

from gradserve.calls.accumulators.components import Component, PackedArray, PackedPieces, Sent
from gradserve.calls.exchange import Operation, Work
from gradserve.calls.identity import MAY_COME_AGAIN, CallId
from gradserve.codecs import Codec, packing_of
from gradserve.results import Outcome, TensorHandle
from gradserve_protocol.arrays import AnyArray, Array, host_array
from gradserve_protocol.codecs import MalformedError, UnpackableError
from gradserve_protocol.codecs.codec import RandomBits
from gradserve_protocol.errors import InternalError, InvalidArgumentError

_MOST_KEPT = 4
"""The most calls whose bytes are kept to be sent again. Each takes as much memory as its update."""
_NAME = "update"
_FLOAT16 = np.finfo(np.float16)

Pieces = Callable[[str, Array], Mapping[int, Array]]
"""Cuts a component into the rows of each server."""


@dataclass(frozen=True, eq=False)
class PackedUpdate:
    """An update as it is sent, which `ParameterComponents.gradient` takes for one.

    Attributes:
        values: The packed components.
        worker_id: Its worker.
        local_step: The step from which it was computed.
        errors: What its values lack of what they were to be, by component; empty if errors are not kept, or once the
            update was accepted.
        before: The errors that were added to it.
    """

    values: dict[str, Sent]
    worker_id: str
    local_step: Any
    errors: Mapping[str, Array] = field(default_factory=dict)
    before: Mapping[str, Array] = field(default_factory=dict)


class Packer:
    """Packs the updates of one parameters, and keeps their errors. Safe to use from several threads.

    The error of an update counts once the server has accepted it. What becomes of a call that failed is known when it
    is made again: its bytes are kept for that, as the server knows it by them, too.
    """

    def __init__(self, name: str, components: Iterable[Component], pieces: Pieces | None = None) -> None:
        """`pieces` is for sharded parameters."""
        self._name = name
        self._components = {each.name: each for each in components}
        self._pieces = pieces
        self._lock = threading.Lock()
        self._errors: dict[tuple[str, str], Array] = {}
        """By worker and component."""
        self._kept: OrderedDict[CallId, PackedUpdate] = OrderedDict()

    def pack(
        self, values: Mapping[str, Sent], codec: Codec, worker_id: str, local_step: Any, call: CallId | None
    ) -> Operation[PackedUpdate]:
        """Packs an update, with the errors of its worker; of a call that is made again, returns what it has sent.

        Args:
            values: The update.
            codec: The codec.
            worker_id: Its worker.
            local_step: The step from which it was computed.
            call: The call that is made again; None for a new one.

        Raises:
            InvalidArgumentError: A component is a handle, or of another shape, or a value does not fit into the codec.
        """
        with self._lock:
            kept = None if call is None else self._kept.get(call)
        if kept is not None:
            return kept
        packed: PackedUpdate = yield Work(partial(self._packed, values, codec, worker_id, local_step))
        return packed

    @contextmanager
    def sent(
        self, update: PackedUpdate, call: CallId | None, call_of: Callable[[int], CallId]
    ) -> Generator[Callable[[Outcome], None]]:
        """Follows the call of an update, made in a block; the block passes the outcome to the function that it gets.

        Args:
            update: The update.
            call: The call, if its number was known before.
            call_of: Returns the call of a request id.
        """

        def settle(outcome: Outcome) -> None:
            with self._lock:
                if outcome is Outcome.ACCEPTED:
                    self._accept(update)
                    if call is not None:
                        self._keep(call, replace(update, errors={}, before={}))
                elif outcome is Outcome.ALREADY_COUNTED:
                    # That may be of a call that seemed to fail.
                    for each, kept in reversed(self._kept.items()):
                        if (kept.worker_id, kept.local_step) == (update.worker_id, update.local_step):
                            self._accept(kept)
                            self._kept[each] = replace(kept, errors={}, before={})
                            break

        try:
            yield settle
        except MAY_COME_AGAIN as error:
            if error.request_id is not None:
                with self._lock:
                    self._keep(call_of(error.request_id), update)
            raise
        except GeneratorExit:  # interrupted: it can be made again if its number is known
            if call is not None:
                with self._lock:
                    self._keep(call, update)
            raise

    def _keep(self, call: CallId, update: PackedUpdate) -> None:
        self._kept.pop(call, None)
        self._kept[call] = update
        while len(self._kept) > _MOST_KEPT:
            self._kept.popitem(last=False)

    def _accept(self, update: PackedUpdate) -> None:
        for name, error in update.errors.items():
            key = (update.worker_id, name)
            present, before = self._errors.get(key), update.before.get(name)
            if present is before or present is None:
                self._errors[key] = error
            else:  # that of a later update, which had the same error added
                self._errors[key] = present + error if before is None else present + (error - before)

    def _packed(self, values: Mapping[str, Sent], codec: Codec, worker_id: str, local_step: Any) -> PackedUpdate:
        packing = packing_of(codec)
        packed: dict[str, Sent] = {}
        errors: dict[str, Array] = {}
        before: dict[str, Array] = {}
        for name, value in values.items():
            if isinstance(value, TensorHandle):
                raise InvalidArgumentError(
                    f"expected arrays with a codec, got the handle of a tensor for component {name!r}",
                    field=_field(name),
                )
            array = host_array(cast("AnyArray", value))
            if array.shape != (shape := self._components[name].shape):
                raise InvalidArgumentError(
                    f"Shape mismatch: expected {list(shape or ())}, got {list(array.shape)}",
                    field=_field(name),
                    code="GS_SHAPE_MISMATCH",
                )
            if packing.keeps_error:
                array = array.astype(np.float64 if array.dtype == np.float64 else np.float32, copy=False)
                with self._lock:
                    error = self._errors.get((worker_id, name))
                if error is not None:
                    before[name] = error
                    array = array + error
            pieces = {0: array} if self._pieces is None else self._pieces(name, array)
            sent: dict[int, PackedArray] = {}
            for server, piece in pieces.items():
                seed = self._seed(worker_id, local_step, name, server) if codec.stochastic else None
                try:
                    data = packing.encode(piece, None if seed is None else RandomBits(seed))
                except UnpackableError as problem:
                    raise InvalidArgumentError(f"component {name!r}: {problem}", field=_field(name)) from None
                sent[server] = PackedArray(packing, data)
            packed[name] = sent[0] if self._pieces is None else PackedPieces(array.shape, sent)
            if packing.keeps_error:
                decoded = [packing.decode(each.data, pieces[server].size) for server, each in sent.items()]
                whole = decoded[0] if len(decoded) == 1 else np.concatenate(decoded)
                errors[name] = array - whole.reshape(array.shape)
        return PackedUpdate(packed, worker_id, local_step, errors, before)

    def _seed(self, worker_id: str, local_step: Any, component: str, server: int) -> int:
        what = repr((self._name, worker_id, int(local_step), component, server)).encode()
        return int.from_bytes(hashlib.blake2b(what, digest_size=16).digest(), "big")


def _field(component: str) -> str:
    return f"{_NAME}[{component!r}]" if component else _NAME


def unpacked(
    components: Iterable[Component],
    received: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    *,
    read_only: bool,
) -> Operation[dict[str, Any]]:
    """Returns the components of a version with arrays in place of packed ones, in the components' dtypes.

    Args:
        components: The components.
        received: What has come, by name.
        shapes: The shapes of what has come.
        read_only: Whether the arrays are to be read-only.

    Raises:
        InternalError: The server has sent what is not the packed form of a component.
    """
    dtypes = {each.name: each.dtype for each in components}

    def unpack() -> dict[str, Any]:
        return {
            name: _unpacked(name, value, shapes[name], dtypes[name], read_only=read_only)
            if isinstance(value, PackedArray)
            else value
            for name, value in received.items()
        }

    values: dict[str, Any] = yield Work(unpack)
    return values


def _unpacked(name: str, value: PackedArray, shape: tuple[int, ...], dtype: Any, *, read_only: bool) -> Array:
    size = int(np.prod(shape, dtype=np.int64))
    try:
        values = value.codec.decode(value.data, size)
    except MalformedError as error:
        raise InternalError(f"the server sent component {name!r} of a version wrongly: {error}") from None
    if dtype == np.float16:
        np.clip(values, _FLOAT16.min, _FLOAT16.max, out=values)  # bfloat16 may be rounded beyond
    array = values.reshape(shape).astype(dtype, copy=False)
    array.flags.writeable = not read_only
    return array
