"""Creates accumulators, and describes, lists and deletes them by name: the messages of that."""

from collections.abc import Mapping
from dataclasses import dataclass

from gradserve.calls.accumulators.components import Component, Components
from gradserve.calls.accumulators.contributions import different_workers
from gradserve.calls.arguments import as_durability
from gradserve.calls.exchange import Operation, Unary
from gradserve.conversion.arrays import as_dtype
from gradserve.conversion.plain import as_choice, as_text, as_texts, plain_fields
from gradserve.results import AccumulatorInfo, DTypeLike
from gradserve_protocol.argument import Argument
from gradserve_protocol.errors import InvalidArgumentError
from gradserve_protocol.messages import decode_duration
from gradserve_protocol.tensors import to_data_type
from gradserve_protocol.v1 import accumulator_messages_pb2 as messages_pb2
from gradserve_protocol.v1 import accumulator_pb2, lease_pb2

_SERVICE = "AccumulatorService"
_PLAIN_OPTIONS = ("deterministic", "keep_averages", "one_per_worker", "refuse_non_finite")
_REDUCTIONS = {"MEAN": accumulator_pb2.REDUCTION_MEAN, "SUM": accumulator_pb2.REDUCTION_SUM}


@dataclass(frozen=True)
class AccumulatorOptions:
    """The properties of a new accumulator, see AccumulatorSpec in the protos, and of this client's view of it."""

    reduction_type: str = "MEAN"
    container: str = ""
    accumulate_dtype: DTypeLike | None = None
    deterministic: bool = False
    keep_averages: int = 1
    one_per_worker: bool = False
    refuse_non_finite: bool = False
    idle_lease: float | None = None
    durability: str | None = None
    device: str | None = None
    agreement: Mapping[str, str] | None = None
    sharded: bool | None = False
    ends_when_lost: bool = False


def creation_of(
    name: str, components: Components, options: AccumulatorOptions, lifetime: lease_pb2.Lifetime
) -> messages_pb2.CreateAccumulatorRequest:
    """Returns the request that creates an accumulator, or finds the one with this name, spec and lifetime."""
    container = as_text(options.container, Argument("container"))
    spec = accumulator_pb2.AccumulatorSpec(
        components=map(component_message, components),
        reduction=_REDUCTIONS[as_choice(options.reduction_type, tuple(_REDUCTIONS), Argument("reduction_type"))],
        **plain_fields(
            accumulator_pb2.AccumulatorSpec,
            {name: getattr(options, name) for name in _PLAIN_OPTIONS},
        ),
    )
    spec.durability = as_durability(options.durability)
    if options.device is not None:
        spec.device = as_text(options.device, Argument("device"))
    if options.agreement is not None:
        spec.agreement.update(as_texts(options.agreement, Argument("agreement")))
    if options.accumulate_dtype is not None:
        spec.accumulate_dtype = to_data_type(as_dtype(options.accumulate_dtype, Argument("accumulate_dtype")))
    if spec.keep_averages < 1:
        raise InvalidArgumentError(
            f"expected keep_averages of at least 1, got {spec.keep_averages}", field="keep_averages"
        )
    return messages_pb2.CreateAccumulatorRequest(
        accumulator=accumulator_pb2.AccumulatorRef(container=container, name=name), spec=spec, lifetime=lifetime
    )


def describe(ref: accumulator_pb2.AccumulatorRef) -> Operation[AccumulatorInfo]:
    """Describes an accumulator by its name."""
    request = messages_pb2.GetAccumulatorRequest(accumulator=ref)
    reply: messages_pb2.GetAccumulatorResponse = yield Unary(_SERVICE, "GetAccumulator", request)
    return described(reply.info)


def create(request: messages_pb2.CreateAccumulatorRequest) -> Operation[accumulator_pb2.AccumulatorInfo]:
    """Creates an accumulator; returns its description."""
    reply: messages_pb2.CreateAccumulatorResponse = yield Unary(_SERVICE, "CreateAccumulator", request)
    return reply.info


def delete(
    ref: accumulator_pb2.AccumulatorRef, home_incarnation: str = ""
) -> Operation[messages_pb2.DeleteAccumulatorResponse]:
    """Deletes an accumulator; returns whether it existed, and what is gone.

    Args:
        ref: Its name.
        home_incarnation: On a server that is not its home: what the home has answered.
    """
    request = messages_pb2.DeleteAccumulatorRequest(accumulator=ref, home_incarnation=home_incarnation)
    reply: messages_pb2.DeleteAccumulatorResponse = yield Unary(_SERVICE, "DeleteAccumulator", request)
    return reply


def list_accumulators(container: str) -> Operation[list[AccumulatorInfo]]:
    """Lists the accumulators of a container."""
    found: list[AccumulatorInfo] = []
    container = as_text(container, Argument("container"))
    request = messages_pb2.ListAccumulatorsRequest(container=container)
    while True:
        reply: messages_pb2.ListAccumulatorsResponse = yield Unary(_SERVICE, "ListAccumulators", request)
        found += [described(info) for info in reply.accumulators]
        if not reply.next_page_token:
            return found
        request = messages_pb2.ListAccumulatorsRequest(container=container, page_token=reply.next_page_token)


def described(info: accumulator_pb2.AccumulatorInfo) -> AccumulatorInfo:
    """Returns the description of an accumulator."""
    return AccumulatorInfo(
        container=info.accumulator.container,
        name=info.accumulator.name,
        global_step=info.global_step,
        num_accumulated=info.num_accumulated,
        num_waiting=info.num_waiting,
        num_bytes=info.num_bytes,
        worker_ids=tuple(info.worker_ids),
        kept_steps=tuple(info.kept_steps),
        is_private=info.is_private,
        idle_lease=decode_duration(info, "idle_lease"),
        device=info.spec.device or "cpu",
        agreement=dict(info.spec.agreement),
        incarnation=info.accumulator.incarnation,
        num_shards=info.spec.num_shards,
        different_workers=different_workers(info),
    )


def component_message(component: Component) -> accumulator_pb2.ComponentSpec:
    """Returns the message of a component."""
    return accumulator_pb2.ComponentSpec(
        name=component.name,
        dtype=to_data_type(component.dtype),
        shape=accumulator_pb2.PartialShape(unknown_rank=component.shape is None, dims=component.shape),
        layout=accumulator_pb2.LAYOUT_SPARSE if component.is_sparse else accumulator_pb2.LAYOUT_DENSE,
    )
