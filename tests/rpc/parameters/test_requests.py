"""Requests of ParameterService as the domain gets them."""

from typing import Any

import numpy as np
import pytest

from gradserve_protocol.v1 import accumulator_pb2, parameters_pb2, tensor_pb2
from gradserve_server.accumulators.spec import ComponentSpec, PartialShape
from gradserve_server.errors import InvalidArgumentError
from gradserve_server.parameters.optimizers.sgd import Sgd
from gradserve_server.parameters.spec import Normalization, UpdateKind
from gradserve_server.rpc.parameters.requests import (
    decode_change_id,
    decode_key,
    decode_parameters_spec,
    decode_records_page,
    decode_update,
    decode_version,
    names_in,
)
from gradserve_server.security.identity import ANONYMOUS
from gradserve_server.storage.journal import Durability
from gradserve_server.tensors.payload import NO_PAYLOAD
from tests.bad_input.requests import F32, component, dense, identity, sparse, tensor, zeros
from tests.rpc.parameters.requests import (
    MOMENTUM,
    SGD,
    Change,
    Create,
    Rounds,
    W,
    create,
    push,
    push_pull,
    ref,
    spec,
    values,
)

COMPONENTS = (
    ComponentSpec("w", np.dtype(np.float32), PartialShape((2, 3))),
    ComponentSpec("b", np.dtype(np.float32), PartialShape((3,))),
)
HALF = (ComponentSpec("w", np.dtype(np.float16), PartialShape((2, 3))),)


def test_an_empty_container_is_the_default_one() -> None:
    assert str(decode_key(ref("net"))) == "default/net"
    assert str(decode_key(ref("net", container="team"))) == "team/net"


# Specs


@pytest.mark.parametrize(
    ("fields", "name", "expected"),
    [
        ({}, "update", UpdateKind.DELTA),
        ({"update": parameters_pb2.UPDATE_KIND_DELTA}, "update", UpdateKind.DELTA),
        ({"update": parameters_pb2.UPDATE_KIND_GRADIENT}, "update", UpdateKind.GRADIENT),
        ({}, "normalization", Normalization.WEIGHTS),
        ({"normalization": parameters_pb2.NORMALIZATION_WEIGHTS}, "normalization", Normalization.WEIGHTS),
        ({"normalization": parameters_pb2.NORMALIZATION_COUNT}, "normalization", Normalization.COUNT),
        ({}, "clip_norm", None),
        ({"clip_norm": 2.5}, "clip_norm", 2.5),
        ({}, "keep_versions", 2),
        ({"keep_versions": 7}, "keep_versions", 7),
        ({}, "keep_rounds", 1000),
        ({"keep_rounds": 3}, "keep_rounds", 3),
        ({}, "deterministic", False),
        ({"deterministic": True}, "deterministic", True),
        ({}, "refuse_non_finite", True),
        ({"accept_non_finite": True}, "refuse_non_finite", False),
        ({}, "one_per_worker", True),
        ({"many_per_worker": True}, "one_per_worker", False),
        ({}, "durability", None),
        ({"durability": accumulator_pb2.DURABILITY_ROUND}, "durability", Durability.ROUND),
        ({"agreement": {"model": "net"}}, "agreement", {"model": "net"}),
    ],
)
def test_properties(fields: dict[str, Any], name: str, expected: object) -> None:
    assert getattr(decode_parameters_spec(spec(**fields)), name) == expected


def test_components_and_rules() -> None:
    found = decode_parameters_spec(spec())
    assert found.components == COMPONENTS
    assert found.rules.optimizer == Sgd(1.0, 0.0, 0.0, 0.0, nesterov=False)
    assert found.rules.rounds.num_required == 1
    assert found.rules.schedule.factor(1000) == 1.0


def without_components() -> parameters_pb2.ParametersSpec:
    found = spec()
    found.ClearField("components")
    return found


BAD_SPECS: list[tuple[str, parameters_pb2.ParametersSpec, str]] = [
    ("expected at least one component", without_components(), "spec.components"),
    (
        "component 'b': expected a known DataType",
        spec(W, component("b", dtype=99, dims=[1])),
        "spec.components[1].dtype",
    ),
    ("expected dense components", spec(component("w", dims=[2], layout=2)), "spec.components[0].layout"),
    ("expected a known shape", spec(component("w", dims=[2, -1])), "spec.components[0].shape"),
    ("expected a known shape", spec(component("w")), "spec.components[0].shape"),
    ("'w' twice", spec(W, W), "spec.components[1].name"),
    ("expected a known kind of updates, got 99", spec(update=99), "spec.update"),
    ("expected a known normalization, got 99", spec(normalization=99), "spec.normalization"),
    ("expected a known durability, got 99", spec(durability=99), "spec.durability"),
    ("expected keep_versions of at least 1, got -1", spec(keep_versions=-1), "spec.keep_versions"),
    ("expected keep_rounds of at least 1, got -1", spec(keep_rounds=-1), "spec.keep_rounds"),
    ("expected a positive, finite clip_norm, got 0", spec(clip_norm=0.0), "spec.clip_norm"),
    ("expected a positive, finite clip_norm, got nan", spec(clip_norm=float("nan")), "spec.clip_norm"),
    ("expected a name for each entry", spec(agreement={"": "x"}), "spec.agreement"),
]


@pytest.mark.parametrize(("message", "bad", "field"), BAD_SPECS)
def test_bad_specs(message: str, bad: parameters_pb2.ParametersSpec, field: str) -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        decode_parameters_spec(bad)
    assert message in raised.value.message
    assert raised.value.field == field


# Updates


def test_the_sender_and_the_weight_of_an_update() -> None:
    request = push(sequence=7, local_step=3, weight=2.5, worker_id="a", release_handles=True)
    call, contribution, given = decode_update(request, NO_PAYLOAD)
    assert call is not None
    assert (call.client_id, call.sequence) == ("somebody", 7)
    assert (contribution.local_step, contribution.weight, contribution.worker_id) == (3, 2.5, "a")
    assert (contribution.sequence, contribution.was_accepted) == (7, False)
    assert (given.path, given.release, [each.name for each in given.components]) == ("update", True, ["w", "b"])
    assert [each.field for each in given.tensors] == ["update[0].dense", "update[1].dense"]


def test_a_weight_of_one_and_no_id_by_default() -> None:
    call, contribution, _ = decode_update(push(), NO_PAYLOAD)
    assert (call, contribution.weight) == (None, 1.0)


def test_an_update_that_was_accepted_before() -> None:
    assert decode_update(push(accepted_before=True), NO_PAYLOAD)[1].was_accepted


@pytest.mark.parametrize(
    ("fields", "is_same"),
    [
        ({}, True),
        ({"release_handles": True}, True),
        ({"accepted_before": True}, True),
        ({"local_step": 1}, False),
        ({"weight": 2.0}, False),
        ({"weight": 1.0}, True),
        ({"worker_id": "b"}, False),
        ({"update": values(1.0, 2.0)}, False),
        ({"update": values(1.0, 1.0)[:1]}, False),
        ({"update": values(1.0, 1.0)[::-1]}, False),
    ],
)
def test_what_a_repeated_call_repeats(fields: dict[str, Any], is_same: bool) -> None:
    first, _, _ = decode_update(push(sequence=1), NO_PAYLOAD)
    again, _, _ = decode_update(push(sequence=1, **fields), NO_PAYLOAD)
    assert first is not None
    assert again is not None
    assert (first.fingerprint == again.fingerprint) is is_same


def test_a_push_is_no_push_pull() -> None:
    first, _, _ = decode_update(push(sequence=1), NO_PAYLOAD)
    other, _, _ = decode_update(push_pull(request_id=identity(1)), NO_PAYLOAD)
    assert first is not None
    assert other is not None
    assert first.fingerprint != other.fingerprint


@pytest.mark.parametrize(
    ("names", "components", "expected"),
    [
        (["b", "w"], COMPONENTS, ["b", "w"]),
        (["x", "x"], COMPONENTS, ["x", "x"]),  # the domain refuses them
        ([""], COMPONENTS, [""]),
        ([""], COMPONENTS[:1], ["w"]),
        (["", ""], COMPONENTS[:1], ["", ""]),
    ],
)
def test_the_only_component_needs_no_name(
    names: list[str], components: tuple[ComponentSpec, ...], expected: list[str]
) -> None:
    given = decode_update(push(update=[dense(zeros(1), name) for name in names]), NO_PAYLOAD)[2]
    assert names_in(given, components) == expected


# Saved versions

STATE = parameters_pb2.OptimizerState(
    slots=[
        parameters_pb2.Slot(name="momentum_buffer", component="w", value=zeros(2, 3)),
        parameters_pb2.Slot(name="momentum_buffer", component="b", value=zeros(3)),
    ],
    component_steps=[4, 5],
    rounds=6,
    optimizer=MOMENTUM,
)


def changed(**fields: Any) -> parameters_pb2.OptimizerState:
    """Returns STATE with other fields."""
    state = parameters_pb2.OptimizerState()
    state.CopyFrom(STATE)
    for name, value in fields.items():
        state.ClearField(name)
        state.MergeFrom(parameters_pb2.OptimizerState(**{name: value}))
    return state


def slot(name: str, component_name: str, value: tensor_pb2.Tensor) -> parameters_pb2.Slot:
    return parameters_pb2.Slot(name=name, component=component_name, value=value)


def loaded(request: Any, components: tuple[ComponentSpec, ...] = COMPONENTS) -> Any:
    version = decode_version(request, NO_PAYLOAD)
    return None if version is None else version.loaded(components)


def test_no_values_are_no_version() -> None:
    assert loaded(Create(parameters=ref())) is None
    assert loaded(Change(parameters=ref())) is None


def test_values_in_the_order_of_the_spec() -> None:
    found = loaded(create(values=values(1.0, 2.0)[::-1], step=3))
    assert [(name, value.shape) for name, value in found.values.items()] == [("w", (2, 3)), ("b", (3,))]
    assert (set(found.values["w"].flat), set(found.values["b"])) == ({1.0}, {2.0})
    assert (found.step, found.state) == (3, None)


def test_the_state_of_an_optimizer() -> None:
    found = loaded(Change(values=values(), state=STATE)).state
    assert {name: set(slots) for name, slots in found.slots.items()} == {"momentum_buffer": {"w", "b"}}
    assert (found.component_steps, found.rounds) == ({"w": 4, "b": 5}, 6)
    assert found.optimizer == Sgd(1.0, 0.5, 0.0, 0.0, nesterov=False)


def test_masters_of_16_bit_components_are_float32() -> None:
    state = parameters_pb2.OptimizerState(slots=[slot("master", "w", zeros(2, 3))], component_steps=[1], optimizer=SGD)
    half = [dense(tensor(np.zeros((2, 3)), np.float16), "w")]
    assert loaded(Change(values=half, state=state), HALF).state.slots["master"]["w"].dtype == np.float32


BAD_VERSIONS: list[tuple[str, Any, str]] = [
    ("expected values with step, got none", create(values=[], step=1), "step"),
    ("expected values with state, got none", create(values=[], state=STATE), "state"),
    ("expected values with step, got none", Change(step=1), "step"),
    ("expected values with state, got none", Change(state=STATE), "state"),
    ("expected a step of at least 0, got -1", create(step=-1), "step"),
    ("expected every component, got none for ['b']", create(values=values()[:1]), "values"),
    ("expected components ['b', 'w'], got 'x'", create(values=[*values(), dense(zeros(1), "x")]), "values[2].name"),
    ("expected components ['b', 'w'], got ''", create(values=[dense(zeros(2, 3))]), "values[0].name"),
    ("expected every component once, got 'b' twice", create(values=[*values(), values()[1]]), "values[2].name"),
    ("got sparse", create(values=[sparse([0], (1, 3), name="w")]), "values[0]"),
    ("got none", create(values=[accumulator_pb2.ComponentGradient(name="w")]), "values[0]"),
    ("expected shape [2,3], got [3, 2]", create(values=[dense(zeros(3, 2), "w")]), "values[0].dense.shape"),
    (
        "expected dtype float32, got float64",
        create(values=[dense(tensor(np.zeros((2, 3)), np.float64), "w")]),
        "values[0].dense.dtype",
    ),
    (
        "expected content or a handle",
        create(values=[dense({"dtype": F32, "shape": [2, 3]}, "w")]),
        "values[0].dense",
    ),
    (
        "got 'x'",
        create(state=changed(slots=[slot("sum", "x", zeros(3))])),
        "state.slots[0].component",
    ),
    (
        "expected slot 'sum' of component 'b' once, got it twice",
        create(state=changed(slots=[slot("sum", "b", zeros(3))] * 2)),
        "state.slots[1].name",
    ),
    (
        "expected shape [3], got [4]",
        create(state=changed(slots=[slot("sum", "b", zeros(4))])),
        "state.slots[0].value.shape",
    ),
    ("expected at most 16 slots", create(state=changed(slots=[slot("sum", "b", zeros(3))] * 17)), "state.slots"),
    (
        "expected a number for each of 2 components, got 1",
        create(state=changed(component_steps=[1])),
        "state.component_steps",
    ),
]


@pytest.mark.parametrize(("message", "request_", "field"), BAD_VERSIONS)
def test_bad_versions(message: str, request_: Any, field: str) -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        loaded(request_)
    assert message in raised.value.message
    assert raised.value.field == field


# Changes and rounds


@pytest.mark.parametrize(
    ("fields", "is_same"),
    [
        ({}, True),
        ({"release_handles": True}, True),
        ({"optimizer": MOMENTUM}, False),
        ({"schedule": parameters_pb2.Schedule(warmup=1)}, False),
        ({"rounds": parameters_pb2.RoundRules(num_required=2)}, False),
        ({"values": values(2.0)}, False),
        ({"step": 9}, False),
        ({"state": STATE}, False),
    ],
)
def test_what_a_repeated_change_repeats(fields: dict[str, Any], is_same: bool) -> None:
    def fingerprint(**more: Any) -> bytes:
        request = Change(request_id=identity(1), **{"optimizer": SGD, "values": values(1.0), **more})
        call = decode_change_id(request, decode_version(request, NO_PAYLOAD), ANONYMOUS)
        assert call is not None
        return call.fingerprint

    assert (fingerprint() == fingerprint(**fields)) is is_same


def test_a_change_needs_no_id() -> None:
    assert decode_change_id(Change(optimizer=SGD), None) is None


@pytest.mark.parametrize(("size", "most"), [(0, 100), (1, 1), (1000, 1000), (1001, 1000)])
def test_the_length_of_a_list_of_rounds(size: int, most: int) -> None:
    since, page = decode_records_page(Rounds(since=4, page_size=size))
    assert (since, page.size) == (4, most)


@pytest.mark.parametrize("field", ["since", "page_size"])
def test_negative_numbers_of_rounds(field: str) -> None:
    request = Rounds()
    setattr(request, field, -1)
    with pytest.raises(InvalidArgumentError, match="of at least 0") as raised:
        decode_records_page(request)
    assert raised.value.field == field
