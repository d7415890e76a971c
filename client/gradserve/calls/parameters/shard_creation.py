"""The creation of parameters on one server, and of sharded ones on all servers of a cluster."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from google.protobuf.message import Message

from gradserve.calls.accumulators.components import Sent, arrays_of
from gradserve.calls.accumulators.sharding.shard import Parts
from gradserve.calls.accumulators.sharding.staging import sent_together
from gradserve.calls.combinators import at_target
from gradserve.calls.exchange import Operation, Progress, Reply, Unary, Whole
from gradserve.calls.parameters.shards import parts_of_state
from gradserve.calls.parameters.wire import PARAMETERS, add_saved
from gradserve.calls.tensors import call_with_arrays
from gradserve.saved.parameters import SavedState
from gradserve_protocol.errors import AbortedError, InvalidArgumentError
from gradserve_protocol.v1 import parameters_messages_pb2 as messages_pb2
from gradserve_protocol.v1 import tensor_pb2


def created(
    request: messages_pb2.CreateParametersRequest,
    values: Mapping[str, Sent],
    state: SavedState | None,
    step: int,
    target: int,
    progress: Progress | None,
) -> Operation[messages_pb2.CreateParametersResponse]:
    """Creates parameters on one server, or a shard there; returns the response.

    Args:
        request: The request, without values.
        values: The values by component.
        state: The state of the optimizer; None for a new one.
        step: The step of the values.
        target: The index of the server, which has to be the first one if some values are stored there.
        progress: Told how many bytes were moved.
    """
    arrays: list[Any]
    arrays, has_handles = arrays_of(values)
    if has_handles and target:
        raise InvalidArgumentError(
            f"expected arrays, got the handle of a tensor: tensors are on server 0 of the cluster, and the home of "
            f"parameters {request.parameters.name!r} is server {target}",
            field="values",
        )
    if state is not None:
        if (ours := request.spec.optimizer.WhichOneof("kind")) != (theirs := state.optimizer.WhichOneof("kind")):
            raise InvalidArgumentError(
                f"expected optimizer {theirs}, whose state is in the file, got {ours}", field="optimizer"
            )
        arrays += state.slots.values()

    def with_values(tensors: Sequence[tensor_pb2.Tensor]) -> Message:
        message = messages_pb2.CreateParametersRequest()
        message.CopyFrom(request)
        message.release_handles = not has_handles
        message.step = step
        add_saved(message, values, state, tensors)
        return message

    reply = yield from call_with_arrays(
        PARAMETERS.name, "CreateParameters", arrays, with_values, released=not has_handles, progress=progress
    )
    response: messages_pb2.CreateParametersResponse = reply.message
    return response


CreateAt = Callable[
    [int, Operation[messages_pb2.CreateParametersResponse]], Operation[messages_pb2.CreateParametersResponse]
]
"""Creates a shard on a server, given the operation that does it."""


class Creation(NamedTuple):
    """Sharded parameters that are to be created, and the values of all components.

    Attributes:
        request: The request at their home, without values and with a creator.
        parts: The parts of the servers.
        members: The servers, as requests name them.
        values: The values; None to find them only.
        state: The state of the optimizer; None for a new one.
        step: The step of the values.
    """

    request: messages_pb2.CreateParametersRequest
    parts: Parts
    members: Mapping[int, str]
    values: Mapping[str, Sent] | None
    state: SavedState | None
    step: int


def found_or_created(
    creation: Creation, home: int, create_at: CreateAt = at_target, progress: Progress | None = None
) -> Operation[messages_pb2.CreateParametersResponse]:
    """Finds sharded parameters, or creates them: first on all servers but their home, which then decides.

    Args:
        creation: The parameters.
        home: The index of their home.
        create_at: Creates the shard of a server.
        progress: Told how many bytes were moved.

    Returns:
        The response of the home. It has no description if the caller has the turn to create them, and no values.
    """
    num_bytes = sum([each.nbytes for each in arrays_of(creation.values or {})[0]])
    asked = Whole(Unary(PARAMETERS.name, "CreateParameters", creation.request, target=home), reply_bytes=num_bytes)
    while True:
        found: Reply = yield asked
        message: messages_pb2.CreateParametersResponse = found.message
        if message.HasField("info") or creation.values is None:
            return message
        try:
            return (yield from _created_everywhere(creation, home, message.home_incarnation, create_at, progress))
        except AbortedError as error:
            if (error.field or "").rpartition(".")[2] != "home_incarnation":
                raise


def _created_everywhere(
    creation: Creation, home: int, incarnation: str, create_at: CreateAt, progress: Progress | None
) -> Operation[messages_pb2.CreateParametersResponse]:
    values = creation.parts.of_gradient(creation.values or {})
    states = parts_of_state(creation.parts, creation.state)

    def created_at(target: int, progress: Progress | None) -> Operation[messages_pb2.CreateParametersResponse]:
        part = messages_pb2.CreateParametersRequest()
        part.CopyFrom(creation.request)
        part.home_incarnation = incarnation
        part.parameters.member = creation.members[target]
        made = created(part, values[target], states.get(target), creation.step, target, progress)
        return create_at(target, made)

    num_bytes = sum([array.nbytes for each in values.values() for array in arrays_of(each)[0]])
    others = [target for target in creation.parts.servers if target != home]
    yield from sent_together(progress, num_bytes, [partial(created_at, target) for target in others])
    return (yield from created_at(home, None))
