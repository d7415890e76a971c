"""Decodes the requests of ParameterService apart from updates: names, specs, saved versions, changes and reads."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gradserve_protocol.codecs import CODECS_BY_NUMBER, Codec
from gradserve_protocol.v1 import parameters_messages_pb2 as messages_pb2
from gradserve_protocol.v1 import parameters_pb2, tensor_pb2
from gradserve_server.accumulators.gradient import Array
from gradserve_server.accumulators.identity import RequestId
from gradserve_server.accumulators.incoming import (
    IncomingComponent,
    IncomingGradient,
    check_values_dtype,
    components_named,
)
from gradserve_server.accumulators.spec import ComponentSpec, check_agreement
from gradserve_server.errors import InvalidArgumentError
from gradserve_server.limits import MAX_COMPONENTS, check_count, listed, quoted
from gradserve_server.parameters.changes import Changes
from gradserve_server.parameters.optimizers.optimizer import Optimizer
from gradserve_server.parameters.spec import Normalization, ParametersSpec, Rules, UpdateKind
from gradserve_server.parameters.variables import Loaded, OptimizerState, check_step
from gradserve_server.resources.cluster import Member
from gradserve_server.resources.registry import DEFAULT_CONTAINER, ResourceKey
from gradserve_server.rpc.accumulators.gradients import decode_request_id, gradient_id
from gradserve_server.rpc.accumulators.requests import check_component_counts, decode_components
from gradserve_server.rpc.boundary.fields import Page, decode_durability, page_of
from gradserve_server.rpc.parameters.rules import (
    decode_optimizer,
    decode_reduction,
    decode_rules,
    decode_schedule,
    decode_staleness,
)
from gradserve_server.rpc.tensors.messages import decode_tensors
from gradserve_server.security.identity import ANONYMOUS, Identity
from gradserve_server.tensors.incoming import IncomingTensor, IncomingTensors
from gradserve_server.tensors.payload import Payload

# Names and specs

_UPDATES = {
    parameters_pb2.UPDATE_KIND_UNSPECIFIED: UpdateKind.DELTA,
    parameters_pb2.UPDATE_KIND_DELTA: UpdateKind.DELTA,
    parameters_pb2.UPDATE_KIND_GRADIENT: UpdateKind.GRADIENT,
}


_NORMALIZATIONS = {
    parameters_pb2.NORMALIZATION_UNSPECIFIED: Normalization.WEIGHTS,
    parameters_pb2.NORMALIZATION_WEIGHTS: Normalization.WEIGHTS,
    parameters_pb2.NORMALIZATION_COUNT: Normalization.COUNT,
}


_DEFAULT_VERSIONS = 2
_DEFAULT_ROUNDS = 1000


def decode_key(ref: parameters_pb2.ParametersRef, user: Identity = ANONYMOUS) -> ResourceKey:
    """Returns the key of parameters that somebody names."""
    return ResourceKey(ref.container or DEFAULT_CONTAINER, ref.name, user)


def decode_parameters_spec(
    spec: parameters_pb2.ParametersSpec, key: ResourceKey, member: Member | None = None
) -> ParametersSpec:
    """Reads the spec of parameters, with what is derived from it.

    Args:
        spec: The message.
        key: Their name.
        member: The place of this server in a cluster, if it is in one.

    Raises:
        InvalidArgumentError: It is not a valid spec.
    """
    check_component_counts(spec.components)
    if spec.update not in _UPDATES:
        raise InvalidArgumentError(f"expected a known kind of updates, got {spec.update}", field="spec.update")
    if spec.normalization not in _NORMALIZATIONS:
        raise InvalidArgumentError(
            f"expected a known normalization, got {spec.normalization}", field="spec.normalization"
        )
    check_agreement(spec.agreement)
    with components_named("spec.components", spec.components):
        decoded = ParametersSpec(
            components=decode_components(spec.components),
            rules=Rules(
                optimizer=decode_optimizer(spec.optimizer, "spec.optimizer"),
                rounds=decode_rules(spec.rounds, "spec.rounds"),
                schedule=decode_schedule(spec.schedule, "spec.schedule"),
            ),
            update=_UPDATES[spec.update],
            staleness=decode_staleness(spec.staleness, "spec.staleness"),
            normalization=_NORMALIZATIONS[spec.normalization],
            reduction=decode_reduction(spec.reduction, "spec.reduction"),
            clip_norm=spec.clip_norm if spec.HasField("clip_norm") else None,
            keep_versions=spec.keep_versions or _DEFAULT_VERSIONS,
            deterministic=spec.deterministic,
            refuse_non_finite=not spec.accept_non_finite,
            one_per_worker=not spec.many_per_worker,
            durability=decode_durability(spec.durability, "spec.durability"),
            agreement=dict(spec.agreement),
            keep_rounds=spec.keep_rounds or _DEFAULT_ROUNDS,
            num_shards=spec.num_shards,
        )
    if decoded.num_shards and member is not None:
        decoded = decoded.placed(member, key)
    decoded.derive()
    return decoded


# Saved versions

_WithVersion = messages_pb2.CreateParametersRequest | messages_pb2.ChangeParametersRequest


class IncomingSlot(NamedTuple):
    """A value of an optimizer's state in a request: the name of the slot, its component, and the tensor."""

    name: str
    component: str
    value: IncomingTensor


@dataclass(frozen=True)
class IncomingVersion:
    """A saved version in a request, whose tensors are not open yet.

    Attributes:
        values: Its components.
        slots: The values of the optimizer's state.
        tensors: All of these tensors.
        step: Its step; 0 for the first or the next one.
        state: The message with the state of the optimizer; None if there is none.
    """

    values: Sequence[IncomingComponent]
    slots: Sequence[IncomingSlot]
    tensors: IncomingTensors
    step: int
    state: parameters_pb2.OptimizerState | None

    def loaded(self, components: Sequence[ComponentSpec]) -> Loaded:
        """Returns the version, once its tensors are open; its arrays may be used until they are closed.

        Args:
            components: The components of the parameters.

        Raises:
            InvalidArgumentError: A component is missing, unknown or there twice, or a tensor does not fit.
        """
        specs = {each.name: each for each in components}
        values: dict[str, Array] = {}
        for index, given in enumerate(self.values):
            name = given.name or (components[0].name if len(components) == 1 else "")
            field = f"values[{index}]"
            _check_known(name, specs, f"{field}.name")
            if name in values:
                raise InvalidArgumentError(
                    f"expected every component once, got {quoted(name)} twice", field=f"{field}.name"
                )
            assert given.value is not None, "all values are dense"
            values[name] = _fitting(given.value, specs[name])
            check_values_dtype(specs[name], given.value)
        if len(values) < len(specs):
            missing = sorted(specs.keys() - values.keys())
            raise InvalidArgumentError(f"expected every component, got none for {listed(missing)}", field="values")
        return Loaded(values, self.step, self._state(specs))

    def _state(self, specs: Mapping[str, ComponentSpec]) -> OptimizerState | None:
        if self.state is None:
            return None
        slots: dict[str, dict[str, Array]] = {}
        for index, (slot, component, tensor) in enumerate(self.slots):
            field = f"state.slots[{index}]"
            _check_known(component, specs, f"{field}.component")
            values = slots.setdefault(slot, {})
            if component in values:
                raise InvalidArgumentError(
                    f"expected slot {quoted(slot)} of component {quoted(component)} once, got it twice",
                    field=f"{field}.name",
                )
            values[component] = _fitting(tensor, specs[component])
        steps = self.state.component_steps
        if len(steps) != len(specs):
            raise InvalidArgumentError(
                f"expected a number for each of {len(specs)} components, got {len(steps)}",
                field="state.component_steps",
            )
        optimizer = decode_optimizer(self.state.optimizer, "state.optimizer")
        return OptimizerState(slots, dict(zip(specs, steps, strict=True)), self.state.rounds, optimizer)


def has_step(request: _WithVersion) -> bool:
    """Returns True if a request says which step the values have."""
    if isinstance(request, messages_pb2.CreateParametersRequest):
        return request.step != 0
    return request.HasField("step")


def decode_version(
    request: _WithVersion,
    payload: Payload,
    user: Identity = ANONYMOUS,
) -> IncomingVersion | None:
    """Reads the saved version of a request; None if it has none.

    Raises:
        InvalidArgumentError: It has too many parts, a value is not dense, or there is a step or a state without values.
    """
    if not request.values:
        for field, is_set in (("step", has_step(request)), ("state", request.HasField("state"))):
            if is_set:
                raise InvalidArgumentError(f"expected values with {field}, got none", field=field)
        return None
    check_step(request.step)
    check_count(request.values, MAX_COMPONENTS, "components", "values")
    described: list[tuple[str, tensor_pb2.Tensor]] = []
    for index, part in enumerate(request.values):
        kind = part.WhichOneof("value")
        if kind != "dense":
            raise InvalidArgumentError(
                f"expected a dense value for component {quoted(part.name)}, got {kind or 'none'}",
                field=f"values[{index}]",
            )
        described.append((f"values[{index}].dense", part.dense))
    slots = request.state.slots
    check_count(slots, _MOST_SLOTS * len(request.values), "slots", "state.slots")
    described += [(f"state.slots[{index}].value", slot.value) for index, slot in enumerate(slots)]
    tensors = decode_tensors(described, payload, user)
    found = iter(tensors)
    return IncomingVersion(
        values=[IncomingComponent(part.name, next(found)) for part in request.values],
        slots=[IncomingSlot(slot.name, slot.component, next(found)) for slot in slots],
        tensors=tensors,
        step=request.step,
        state=request.state if request.HasField("state") else None,
    )


_MOST_SLOTS = 8
"""The most slots of a component in a request: two of an optimizer, and the master."""


def _check_known(name: str, specs: Mapping[str, ComponentSpec], field: str) -> None:
    if name not in specs:
        raise InvalidArgumentError(f"expected components {listed(sorted(specs))}, got {quoted(name)}", field=field)


def _fitting(tensor: IncomingTensor, component: ComponentSpec) -> Array:
    array: Array = tensor.read()
    if not component.shape.accepts(array.shape):
        raise InvalidArgumentError(
            f"expected shape {component.shape}, got {list(array.shape)}", field=f"{tensor.field}.shape"
        )
    return array


# Reads, changes and rounds


def decode_read_id(request: messages_pb2.ReadParametersRequest, user: Identity = ANONYMOUS) -> RequestId | None:
    """Returns the id of a read, None if it has none."""
    return decode_request_id(request.request_id, b"", user) if request.HasField("request_id") else None


def decode_state_optimizer(request: messages_pb2.ReadParametersRequest) -> Optimizer | None:
    """Returns the optimizer of the state at the home, None if the request has none.

    Raises:
        InvalidArgumentError: It is not valid, or the request asks for no state.
    """
    if not request.HasField("state_optimizer"):
        return None
    if not request.with_state:
        raise InvalidArgumentError("expected none without with_state", field="state_optimizer")
    return decode_optimizer(request.state_optimizer, "state_optimizer")


def decode_codec(
    request: messages_pb2.ReadParametersRequest | messages_pb2.PushPullParametersRequest,
) -> Codec | None:
    """Returns the codec of the version that a call asks for; None for none.

    Raises:
        InvalidArgumentError: It is not known, or not for versions, or also asks for the state of the optimizer.
    """
    if not request.codec:
        return None
    codec = CODECS_BY_NUMBER.get(request.codec)
    if codec is None or not codec.packs_versions:
        known = ", ".join([each.name for each in CODECS_BY_NUMBER.values() if each.packs_versions])
        got = request.codec if codec is None else f"{codec.name}, which is for updates only"
        raise InvalidArgumentError(f"expected a codec for versions, {known}, got {got}", field="codec")
    if isinstance(request, messages_pb2.ReadParametersRequest) and request.with_state:
        raise InvalidArgumentError(f"expected none with with_state, got {codec.name}", field="codec")
    return codec


def decode_step(request: messages_pb2.ReadParametersRequest) -> int | None:
    """Returns the step of the version that a read asks for; None for the newest.

    Raises:
        InvalidArgumentError: It asks for the state of another one than the newest.
    """
    step = request.step if request.HasField("step") else None
    if request.with_state and step is not None:
        raise InvalidArgumentError(
            f"expected with_state without a step, got step {step}: the state is kept for the newest version",
            field="with_state",
        )
    return step


def decode_changes(request: messages_pb2.ChangeParametersRequest, loaded: Loaded | None) -> Changes:
    """Reads what a request changes.

    Raises:
        InvalidArgumentError: A rule is not valid.
    """
    return Changes(
        optimizer=decode_optimizer(request.optimizer, "optimizer") if request.HasField("optimizer") else None,
        schedule=decode_schedule(request.schedule, "schedule") if request.HasField("schedule") else None,
        rounds=decode_rules(request.rounds, "rounds") if request.HasField("rounds") else None,
        loaded=loaded,
        step=request.step if has_step(request) else None,
    )


def decode_change_id(
    request: messages_pb2.ChangeParametersRequest, version: IncomingVersion | None, user: Identity = ANONYMOUS
) -> RequestId | None:
    """Returns the id of a change, None if it has none."""
    if not request.HasField("request_id"):
        return None
    tensors, parts, what = IncomingTensors(()), list[IncomingComponent](), tuple[object, ...]()
    if version is not None:
        tensors = version.tensors
        parts = [*version.values]
        parts += [IncomingComponent(f"{each.name} of {each.component}", each.value) for each in version.slots]
        state = request.state
        what = (has_step(request), version.step, state.rounds, tuple(state.component_steps))
    rules = request.optimizer, request.schedule, request.rounds, request.state.optimizer
    more = [rule.SerializeToString(deterministic=True) + b"\0" for rule in rules]
    return gradient_id(request.request_id, what, IncomingGradient(parts, tensors), user, more=more)


def decode_records_page(request: messages_pb2.ListRoundsRequest) -> tuple[int, Page]:
    """Returns the step after which records are wanted, and the page of them.

    Raises:
        InvalidArgumentError: A number is negative.
    """
    if request.since < 0:
        raise InvalidArgumentError(f"expected a step of at least 0 as since, got {request.since}", field="since")
    return request.since, page_of(request.page_size, "", default_size=100)


def decode_evaluations_page(request: messages_pb2.ListEvaluationsRequest) -> tuple[int | None, Page]:
    """Returns the step after which evaluations are wanted, None for all, and the page of them.

    Raises:
        InvalidArgumentError: The size of the page is negative.
    """
    since = request.since if request.HasField("since") else None
    return since, page_of(request.page_size, "", default_size=100)
