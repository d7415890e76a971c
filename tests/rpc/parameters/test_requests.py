"""Requests of ParameterService as the domain gets them."""

from typing import Any

import numpy as np
import pytest

from gradserve_protocol.v1 import accumulator_pb2, parameters_pb2
from gradserve_server.accumulators.spec import ComponentSpec, PartialShape
from gradserve_server.parameters.optimizers.sgd import Sgd
from gradserve_server.parameters.spec import Normalization, UpdateKind
from gradserve_server.rpc.parameters.requests import (
    decode_change_id,
    decode_key,
    decode_parameters_spec,
    decode_records_page,
    decode_version,
)
from gradserve_server.rpc.parameters.updates import decode_update, names_in
from gradserve_server.security.identity import ANONYMOUS
from gradserve_server.storage.journal import Durability
from gradserve_server.tensors.payload import NO_PAYLOAD
from tests.bad_input.requests import dense, identity, tensor, zeros
from tests.rpc.parameters.requests import (
    MOMENTUM,
    SGD,
    STATE,
    Change,
    Create,
    Rounds,
    create,
    push,
    push_pull,
    ref,
    slot,
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
    assert getattr(decode_parameters_spec(spec(**fields), decode_key(ref("net"))), name) == expected


def test_components_and_rules() -> None:
    found = decode_parameters_spec(spec(), decode_key(ref("net")))
    assert found.components == COMPONENTS
    assert found.rules.optimizer == Sgd(1.0, 0.0, 0.0, 0.0, nesterov=False)
    assert found.rules.rounds.num_required == 1
    assert found.rules.schedule.factor(1000) == 1.0


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


def loaded(request: Any, components: tuple[ComponentSpec, ...] = COMPONENTS) -> Any:
    version = decode_version(request, NO_PAYLOAD)
    return None if version is None else version.loaded(components)


def test_no_values_are_no_version() -> None:
    assert loaded(Create(parameters=ref())) is None
    assert loaded(Change(parameters=ref())) is None


def test_values_in_any_order() -> None:
    found = loaded(create(values=values(1.0, 2.0)[::-1], step=3))
    assert {name: value.shape for name, value in found.values.items()} == {"w": (2, 3), "b": (3,)}
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
