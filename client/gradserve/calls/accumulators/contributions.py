"""Contributions of workers to rounds, gradients and updates: the calls that send them, and wait for their round."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, SupportsFloat, TypeVar

from google.protobuf.message import Message

from gradserve.calls.accumulators.components import Components, Sent, add_values, arrays_of, without_arrays
from gradserve.calls.accumulators.service import Method, RoundService
from gradserve.calls.accumulators.session import RoundSession
from gradserve.calls.exchange import Operation, Progress, Reply, Unary, Whole, encode_timeout
from gradserve.calls.identity import AccumulatorKey, CallId, RequestIds
from gradserve.calls.tensors import call_with_arrays, placement_of
from gradserve.conversion.plain import as_flag, plain_fields
from gradserve.conversion.trees import Tree
from gradserve.results import DifferentWorker, Outcome
from gradserve.workers import TO_WAIT_ON
from gradserve_protocol.argument import Argument
from gradserve_protocol.arrays import AnyArray
from gradserve_protocol.errors import DeadlineExceededError, GradserveError
from gradserve_protocol.gpu import GpuArray
from gradserve_protocol.v1 import accumulator_pb2, tensor_pb2

T = TypeVar("T")
OUTCOMES = {
    accumulator_pb2.APPLY_OUTCOME_ACCEPTED: Outcome.ACCEPTED,
    accumulator_pb2.APPLY_OUTCOME_STALE: Outcome.STALE,
    accumulator_pb2.APPLY_OUTCOME_ALREADY_COUNTED: Outcome.ALREADY_COUNTED,
}
_COPY = Argument("copy")
_DIGEST = Argument("parameters_digest")
_MAX_DIGEST_BYTES = 32


class Contribution(NamedTuple):
    """The step, weight and sender of a gradient or an update; see ApplyGradientRequest in the protos.

    Attributes:
        local_step: The step at which it was computed.
        weight: Its weight in a mean.
        worker_id: The sender's id; None for the client's default, empty for no id.
        parameters_digest: A digest of the sender's parameters, to be compared with those of others; None for none.
        metrics: What the sender of an update has measured, by name; None for nothing.
    """

    local_step: int
    weight: float
    worker_id: str | None
    parameters_digest: bytes | None = None
    metrics: Mapping[str, SupportsFloat] | None = None


class Given(NamedTuple):
    """A contribution as a call gives it.

    Attributes:
        call: The request id of the call.
        local_step: The step at which it was computed.
        values: What is sent for each component.
        weight: Its weight.
        is_kept: Whether the call keeps it until it has the result of the round.
    """

    call: CallId
    local_step: int
    values: Mapping[str, Sent]
    weight: float
    is_kept: bool


Receive = Callable[[Any, Reply, Given], Operation[T]]
"""Returns the result of a call that has waited, from its request, the reply, and what it has contributed."""


class ContributionWire:
    """The calls that contribute to the rounds of one accumulator, or of parameters, and what all calls on it share.

    Attributes:
        target: The index of its server.
        components: Its components.
    """

    def __init__(
        self,
        session: RoundSession,
        components: Components,
        ids: RequestIds,
        *,
        has_default_workers: bool = True,
        deleted: Callable[[str, str], object],
        target: int = 0,
    ) -> None:
        """Takes the resource and its components, and the client's identity.

        Args:
            session: The resource.
            components: Its components.
            ids: The client's request ids.
            has_default_workers: Whether contributions without a worker_id get the client's. They must not if sums are
                in the order of workers, because default ids differ from run to run.
            deleted: Called with container and name after the resource was deleted.
            target: The index of its server.
        """
        self.target = target
        self.components = components
        self._session = session
        self._service: RoundService = session.service
        self._key: AccumulatorKey = (session.service.subject, session.ref.container, session.ref.name)
        self._ids = ids
        self._has_default_workers = has_default_workers
        self._deleted = deleted

    @property
    def ref(self) -> Any:
        """The resource's name."""
        return self._session.ref

    def _apply(
        self, tree: Tree, how: Contribution, request_id: int | None, progress: Progress | None
    ) -> Operation[Any]:
        """Adds a contribution to the round; returns the server's answer.

        Args:
            tree: A tree of the components, or a dict by component name.
            how: Its step, weight and sender.
            request_id: The id of an earlier attempt; None for a new call.
            progress: Told how many bytes were moved.
        """
        service = self._service
        yield from self._ids.pacing.turn(self._key, waits=False)
        call = self._call(request_id)
        values = self.components.gradient(tree)
        carried = self._carried(values)
        arrays, has_handles = arrays_of(carried)
        fields = self._gradient_fields(service.apply.request, how, carried, has_handles=has_handles)
        sent: Message = service.apply.request()

        def request(tensors: Sequence[tensor_pb2.Tensor]) -> Message:
            nonlocal sent
            sent = self._apply_request(fields, call, carried, tensors)
            return sent

        try:
            with self._ids.pacing.sent(self._key):
                reply = yield from self._call_with_gradient(
                    service.apply.name,
                    Given(call, fields["local_step"], values, fields["weight"], is_kept=False),
                    arrays,
                    request,
                    released=not has_handles,
                    progress=progress,
                )
        except GradserveError as error:
            self._identify(error, call)
            raise
        accepted = service.accepted(reply.message)
        if self._session.notes_gradients and accepted.round:
            again = partial(self._apply_request, fields, call, without_arrays(carried))
            yield from self._session.accepted(sent, accepted, again, None if has_handles else arrays)
        return reply.message

    def _push_pull(
        self,
        tree: Tree,
        how: Contribution,
        timeout: float,
        request_id: int | None,
        progress: Progress | None,
        receive: Receive[T],
        *,
        plain: Mapping[str, object],
        one_per_worker: bool,
        in_place: bool,
    ) -> Operation[T]:
        """Adds a contribution to the round, and waits for the end of that; returns what `receive` does.

        Args:
            tree: See `_apply`.
            how: Likewise.
            timeout: The seconds to wait.
            request_id: See `_apply`.
            progress: Likewise.
            receive: Returns the result from the reply.
            plain: Other fields of the request.
            one_per_worker: Whether each worker counts once a round.
            in_place: Whether arrays of the reply may be read-only memory of the server.
        """
        service = self._service
        self._session.check()
        values = self.components.gradient(tree)
        carried = self._carried(values)
        arrays, has_handles = arrays_of(carried)
        fields = self._gradient_fields(service.push_pull.request, how, carried, has_handles=has_handles)
        fields |= plain_fields(service.push_pull.request, plain)
        is_alone = one_per_worker and how.worker_id is None and self._has_default_workers
        yield from self._ids.pacing.turn(self._key, waits=True)
        with (
            self._ids.open_calls.alone(self._key, self._ids.worker_id()) if is_alone else contextlib.nullcontext(),
            self._ids.open_calls.opened(self._key, partial(self._call, request_id)) as call,
            self._ids.pacing.sent(self._key),
        ):
            given = Given(call, fields["local_step"], values, fields["weight"], is_kept=True)
            message: Any = service.push_pull.request()

            def request(tensors: Sequence[tensor_pb2.Tensor]) -> Message:
                nonlocal message
                message = service.push_pull.request(**fields, timeout=encode_timeout(timeout))
                self._address(message, call)
                message.placement.CopyFrom(placement_of(keep=False))
                add_values(getattr(message, service.contribution), carried, tensors)
                result: Message = message
                return result

            try:
                reply = yield from self._call_with_gradient(
                    service.push_pull.name,
                    given,
                    arrays,
                    request,
                    wait=timeout,
                    released=not has_handles,
                    in_place=in_place,
                    progress=progress,
                )
                return (yield from receive(message, reply, given))
            except GradserveError as error:
                self._identify(error, call, waits=True)
                raise

    def _worker_id(self, how: Contribution) -> str:
        if how.worker_id is not None:
            return how.worker_id
        return self._ids.worker_id() if self._has_default_workers else ""

    def _unary(self, method: str, request: Message, wait: float = 0.0, *, in_place: bool = False) -> Unary:
        renewal = partial(self._session.renew, request)
        return Unary(self._service.name, method, request, wait, in_place=in_place, renewal=renewal)

    def _waited(self, call: Whole) -> Operation[Reply]:
        """Makes a call that may wait."""
        reply: Reply = yield call
        return reply

    def _request(self, method: Method) -> Any:
        """Returns a request for this resource, unless something was lost."""
        return self._service.request(method, self._checked_ref())

    def _checked_ref(self) -> Any:
        self._session.check()
        return self._session.ref

    def _apply_request(
        self,
        fields: Mapping[str, Any],
        call: CallId,
        values: Mapping[str, Sent],
        tensors: Sequence[tensor_pb2.Tensor],
    ) -> Any:
        message = self._service.apply.request(**fields)
        self._address(message, call)
        add_values(getattr(message, self._service.contribution), values, tensors)
        return message

    def _carried(self, values: Mapping[str, Sent]) -> Mapping[str, Sent]:
        """Returns what of a contribution is in the call that adds it."""
        return values

    def _call_with_gradient(
        self,
        method: str,
        _given: Given,
        arrays: Sequence[AnyArray],
        request: Callable[[Sequence[tensor_pb2.Tensor]], Message],
        *,
        wait: float = 0.0,
        released: bool,
        in_place: bool = False,
        progress: Progress | None,
    ) -> Operation[Reply]:
        """Makes the call that adds a contribution; see `call_with_arrays`."""
        return call_with_arrays(
            self._service.name,
            method,
            arrays,
            request,
            wait=wait,
            released=released,
            in_place=in_place,
            renew=self._session.renew,
            progress=progress,
        )

    def _call(self, request_id: int | None) -> CallId:
        self._session.check()
        return self._ids.new_call() if request_id is None else self._ids.call(request_id)

    def _identify(self, error: GradserveError, call: CallId, *, waits: bool = False) -> None:
        """Puts the request id on an error, so that callers can send the call again or wait on."""
        error.request_id = self._ids.request_id(call)
        if waits and isinstance(error, DeadlineExceededError):
            error.message += f"{TO_WAIT_ON} with request_id={error.request_id}"

    def _address(self, request: Any, call: CallId) -> None:
        """Writes the resource and the request id to a request."""
        # Copying into a request is much faster than passing messages to its constructor, which serializes them.
        self._service.ref(request).CopyFrom(self._session.ref)
        self._ids.write(request.request_id, call, self._key)

    def _gradient_fields(
        self, request: Any, how: Contribution, values: Mapping[str, Sent], *, has_handles: bool
    ) -> dict[str, Any]:
        """Returns the plain fields that all calls with contributions share."""
        plain = {"local_step": how.local_step, "weight": how.weight, "worker_id": self._worker_id(how)}
        fields = plain_fields(request, plain)
        if how.parameters_digest is not None:
            fields["parameters_digest"] = as_digest(how.parameters_digest)
        # Tensors of the caller's stay on the server; what was uploaded for this call need not.
        fields["release_handles"] = not has_handles
        fields["unread_contents"] = GpuArray in map(type, values.values())
        return fields


def as_digest(digest: Any) -> bytes:
    """Returns the argument of a caller for a digest of parameters.

    Raises:
        InvalidArgumentError: It is not bytes, or too long.
    """
    if not isinstance(digest, bytes) or len(digest) > _MAX_DIGEST_BYTES:
        raise _DIGEST.error(f"at most {_MAX_DIGEST_BYTES} bytes", digest)
    return digest


def different_workers(
    message: accumulator_pb2.Average | accumulator_pb2.AccumulatorInfo,
) -> tuple[DifferentWorker, ...]:
    """Returns the workers with other digests of their parameters than most, as a message names them."""
    return tuple(
        [
            DifferentWorker(each.worker_id, each.equal_at if each.HasField("equal_at") else None)
            for each in message.different_workers
        ]
    )


def is_in_place(copy: bool) -> bool:
    """Returns whether arrays of replies may be read-only memory of the server, as the argument `copy` says.

    Raises:
        InvalidArgumentError: It is not a flag.
    """
    return not as_flag(copy, _COPY)
