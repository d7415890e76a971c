"""Mistakes of clients of sharded parameters, and updates that servers forget: raw calls to a home and a follower."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
import pytest

from gradserve_protocol.v1 import accumulator_pb2, parameters_pb2
from gradserve_protocol.v1 import parameters_messages_pb2 as messages_pb2
from tests.bad_input.requests import component, dense, identity, tensor
from tests.cluster.servers import name_at, running_cluster
from tests.rpc.parameters.requests import SGD, Change, Create, Delete, Get, Push, PushPull, Read, Rounds, ref, spec
from tests.servers.raw_calls import RawCalls

INVALID, ABORTED, NOT_FOUND, EXISTS = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS,
)
HOME, OTHER = 0, 1
NAME = name_at(HOME, 2)
PIECES = [accumulator_pb2.Piece(server=HOME, num_rows=2), accumulator_pb2.Piece(server=OTHER, num_rows=1)]
ROWS = {HOME: 2, OTHER: 1}
Stage = messages_pb2.StageUpdateRequest


def sharded(**fields: Any) -> parameters_pb2.ParametersSpec:
    """Returns the spec of three rows, of which two are at the home."""
    return spec(component("w", dims=[3, 2], pieces=PIECES), num_shards=2, **fields)


def rows(server: int, value: float) -> list[accumulator_pb2.ComponentGradient]:
    """Returns a server's rows, all of one number."""
    return [dense(tensor(np.full((ROWS[server], 2), value)), "w")]


@dataclass(frozen=True)
class Shards:
    """Sharded parameters on two servers."""

    raw: list[RawCalls]
    incarnation: str

    @property
    def ref(self) -> parameters_pb2.ParametersRef:
        return ref(NAME, incarnation=self.incarnation)

    def stage(self, sequence: int, value: float = 1.0, *, step: int = 0, epoch: int = 0) -> None:
        """Stages an update on both servers."""
        for server in (HOME, OTHER):
            self.raw[server].call("StageUpdate", self.staging(server, sequence, value, step=step, epoch=epoch))

    def staging(self, server: int, sequence: int, value: float = 1.0, **fields: Any) -> messages_pb2.StageUpdateRequest:
        fields = {"step": 0, "epoch": 0, **fields}
        return Stage(
            parameters=self.ref,
            request_id=identity(sequence),
            local_step=fields["step"],
            update=rows(server, value),
            epoch=fields["epoch"],
        )

    def push(self, sequence: int, *, step: int = 0, epoch: int = 0) -> messages_pb2.PushResponse:
        request = Push(parameters=self.ref, request_id=identity(sequence), local_step=step, epoch=epoch)
        answer: messages_pb2.PushResponse = self.raw[HOME].call("Push", request)
        return answer

    def decided(self) -> list[parameters_pb2.DecidedRound]:
        """Returns all rounds that the home has ended."""
        return [each.decided for each in self.raw[HOME].call("ListRounds", Rounds(parameters=self.ref)).rounds]

    def latest(self) -> parameters_pb2.DecidedRound:
        """Returns the round of the newest version, with what the home keeps now."""
        reading = Read(parameters=self.ref, without_values=True)
        version: parameters_pb2.Version = self.raw[HOME].call("ReadParameters", reading).version
        return version.decided

    def read(self, server: int, **fields: Any) -> set[float]:
        """Returns the numbers of the newest version on a server."""
        version = self.raw[server].call("ReadParameters", Read(parameters=self.ref, **fields)).version
        return set(np.frombuffer(version.components[0].dense.content, np.float32).tolist())

    def held(self, server: int) -> int:
        """Returns the memory that a server uses for the parameters."""
        info = self.raw[server].call("GetParameters", Get(parameters=self.ref)).info
        return int(info.num_bytes)


def begin(raw: list[RawCalls], creator: str = "one", **fields: Any) -> str:
    """Returns the incarnation with which a creator creates the parameters."""
    request = Create(parameters=ref(NAME), spec=sharded(**fields), creator=creator)
    return str(raw[HOME].call("CreateParameters", request).home_incarnation)


def create(raw: list[RawCalls], server: int, incarnation: str, creator: str = "one", **fields: Any) -> Any:
    request = Create(
        parameters=ref(NAME),
        spec=sharded(**fields),
        creator=creator,
        values=rows(server, 0.0),
        home_incarnation=incarnation,
    )
    return raw[server].call("CreateParameters", request)


@pytest.fixture
def raw() -> Iterator[list[RawCalls]]:
    with (
        running_cluster(2) as servers,
        RawCalls(servers[HOME].address) as home,
        RawCalls(servers[OTHER].address) as other,
    ):
        yield [home, other]


@pytest.fixture
def shards(raw: list[RawCalls]) -> Shards:
    incarnation = begin(raw)
    for server in (OTHER, HOME):
        assert create(raw, server, incarnation).created
    return Shards(raw, incarnation)


def test_a_round_on_two_servers(shards: Shards) -> None:
    shards.stage(1)
    assert shards.push(1).outcome == accumulator_pb2.APPLY_OUTCOME_ACCEPTED
    (decided,) = shards.decided()
    assert shards.read(HOME) == {1.0}
    assert shards.read(OTHER) == {0.0}, "it does not know of the round yet"
    for _ in range(2):
        assert shards.read(OTHER, decided=[decided]) == {1.0}, "once, however often it is told"


# Creation


def test_the_last_creator_with_the_turn_creates_the_parameters(raw: list[RawCalls]) -> None:
    """Another one, who was slow, finds what that one has made, or nothing."""
    slow = begin(raw)
    quick = begin(raw)  # the same creator again, as after a crash
    assert slow < quick
    create(raw, OTHER, quick)
    request = Create(
        parameters=ref(NAME), spec=sharded(), creator="one", values=rows(OTHER, 5.0), home_incarnation=slow
    )
    refused = raw[OTHER].fail("CreateParameters", request)
    assert (refused.code, refused.field) == (ABORTED, "home_incarnation")
    assert "parameters" in refused.message
    at_home = Create()
    at_home.CopyFrom(request)
    del at_home.values[:]
    at_home.values.extend(rows(HOME, 5.0))
    refused = raw[HOME].fail("CreateParameters", at_home)
    assert (refused.code, refused.field) == (ABORTED, "home_incarnation")
    again = begin(raw)
    for server in (OTHER, HOME):
        assert create(raw, server, again).created
    assert not create(raw, HOME, again).created


def test_a_later_creation_takes_the_place_of_what_is_left(raw: list[RawCalls]) -> None:
    create(raw, OTHER, begin(raw))  # whose creator dies before the home has its part
    later = begin(raw, "two")
    for server in (OTHER, HOME):
        assert create(raw, server, later, "two").created


def test_a_late_deletion_leaves_later_parameters_alone(shards: Shards) -> None:
    gone = shards.raw[HOME].call("DeleteParameters", Delete(parameters=ref(NAME))).home_incarnation
    later = begin(shards.raw)
    for server in (OTHER, HOME):
        create(shards.raw, server, later)
    late = Delete(parameters=ref(NAME), home_incarnation=gone)
    assert not shards.raw[OTHER].call("DeleteParameters", late).deleted
    assert Shards(shards.raw, later).read(OTHER) == {0.0}


CREATIONS: dict[str, tuple[Callable[[Any], object], str, str]] = {
    "no creator": (lambda request: request.ClearField("creator"), "expected a creator", "creator"),
    "another number of servers": (
        lambda request: request.spec.MergeFrom(parameters_pb2.ParametersSpec(num_shards=3)),
        "sharded over 3 servers, and this server is server 0 of 2",
        "spec.num_shards",
    ),
    "missing rows": (
        lambda request: request.spec.components[0].pieces[1].MergeFrom(accumulator_pb2.Piece(num_rows=5)),
        "rows",
        "spec.components[0].pieces",
    ),
}


@pytest.mark.parametrize("what", CREATIONS)
def test_bad_creations(raw: list[RawCalls], what: str) -> None:
    spoil, message, field = CREATIONS[what]
    request = Create(parameters=ref(NAME), spec=sharded(), creator="one", values=rows(HOME, 0.0))
    spoil(request)
    failure = raw[HOME].fail("CreateParameters", request)
    assert (failure.code, failure.field) == (INVALID, field), failure.message
    assert message in failure.message


# Updates


def test_updates_that_do_not_count_are_forgotten(shards: Shards) -> None:
    shards.stage(1)  # its client dies
    for step in range(4):
        shards.stage(step + 2, step=step)
        shards.push(step + 2, step=step)
        shards.read(OTHER, decided=[shards.latest()])
        if step == 1:
            before = [shards.held(server) for server in (HOME, OTHER)]
    assert shards.held(OTHER) == before[OTHER]
    assert shards.held(HOME) == before[HOME]
    shards.stage(9, step=4)  # its client dies, too, and no round ends any more
    answer = shards.raw[HOME].call("CountUpdates", messages_pb2.CountUpdatesRequest(parameters=shards.ref))
    assert answer.epoch == 1
    for server in (HOME, OTHER):
        told = messages_pb2.ForgetUpdatesRequest(parameters=shards.ref, epoch=1, part_ids=answer.part_ids)
        assert shards.raw[server].call("ForgetUpdates", told).num_forgotten == 1
    late = Push(parameters=shards.ref, request_id=identity(9), local_step=4, epoch=0)
    failure = shards.raw[HOME].fail("Push", late)
    assert (failure.code, failure.field) == (ABORTED, "update")
    shards.stage(9, step=4)
    failure = shards.raw[HOME].fail("Push", late)
    assert (failure.code, failure.field) == (ABORTED, "epoch")
    shards.stage(9, step=4, epoch=1)
    assert shards.push(9, step=4, epoch=1).outcome == accumulator_pb2.APPLY_OUTCOME_ACCEPTED


def test_what_a_round_needs_is_not_forgotten(shards: Shards) -> None:
    """Though the server has not made its version yet, and the home keeps neither that nor the next ones."""
    for step in range(5):
        shards.stage(step + 1, 2.0, step=step)
        shards.push(step + 1, step=step)
    answer = shards.raw[HOME].call("CountUpdates", messages_pb2.CountUpdatesRequest(parameters=shards.ref))
    told = messages_pb2.ForgetUpdatesRequest(parameters=shards.ref, epoch=1, part_ids=answer.part_ids)
    assert shards.raw[OTHER].call("ForgetUpdates", told).num_forgotten == 0
    assert shards.read(OTHER, decided=shards.decided()) == {10.0}


def test_sums_count_as_all_of_their_updates(raw: list[RawCalls]) -> None:
    """Every server applies the same discount, and divides by the same weights."""
    rules: dict[str, Any] = {
        "rounds": parameters_pb2.RoundRules(num_required=3),
        "staleness": parameters_pb2.Staleness(max=1, exponential=parameters_pb2.ExponentialDiscount(base=0.5)),
    }
    incarnation = begin(raw, **rules)
    for server in (OTHER, HOME):
        create(raw, server, incarnation, **rules)
    shards = Shards(raw, incarnation)
    sums = [accumulator_pb2.Summand(weight=weight, worker_id=worker) for weight, worker in ((1.0, "a"), (2.0, "b"))]
    for step, sequence in ((0, 1), (1, 3)):
        for server in (HOME, OTHER):
            staging = shards.staging(server, sequence, 9.0)  # that is 1 * 1 + 2 * 4
            staging.is_wide = True
            raw[server].call("StageUpdate", staging)
        push = Push(parameters=shards.ref, request_id=identity(sequence), epoch=0, sum_of=sums)
        pushed = raw[HOME].call("Push", push)
        factor = 0.5 if step else 1.0
        assert (pushed.weight, pushed.num_updates, pushed.staleness) == (3.0 * factor, 2, step)
        assert raw[HOME].call("Push", push).duplicate
        shards.stage(sequence + 1, 5.0, step=step)
        shards.push(sequence + 1, step=step)
    decided = shards.decided()
    assert [(list(each.weights), [one.discount for one in each.sums]) for each in decided] == [
        ([3.0, 1.0], [1.0]),
        ([1.5, 1.0], [0.5]),
    ]
    assert {(one.index, one.num_updates) for each in decided for one in each.sums} == {(0, 2)}
    found = np.float32(14 / 4) + np.float32(9.5 / 2.5)
    assert shards.read(HOME) == shards.read(OTHER, decided=decided) == {float(np.float32(found))}
    (_, record) = raw[HOME].call("ListRounds", Rounds(parameters=shards.ref)).rounds
    assert [(each.worker_id, each.weight) for each in record.updates] == [("a", 0.5), ("b", 1.0), ("", 1.0)]
    again = Push(parameters=shards.ref, request_id=identity(9), epoch=0, local_step=2)
    again.sum_of.add(worker_id="c").request_id.CopyFrom(identity(4))
    for server in (HOME, OTHER):
        raw[server].call("StageUpdate", shards.staging(server, 9, step=2))
    failure = raw[HOME].fail("Push", again)
    assert (failure.code, failure.field) == (ABORTED, "sum_of")


def test_sums_of_updates_that_are_needed_one_by_one(raw: list[RawCalls]) -> None:
    incarnation = begin(raw, deterministic=True)
    for server in (OTHER, HOME):
        create(raw, server, incarnation, deterministic=True)
    shards = Shards(raw, incarnation)
    shards.stage(1)
    request = Push(parameters=shards.ref, request_id=identity(1), epoch=0, sum_of=[accumulator_pb2.Summand()])
    failure = raw[HOME].fail("Push", request)
    assert (failure.code, failure.field) == (INVALID, "sum_of")
    assert "send them one by one" in failure.message


def test_bad_pushes(shards: Shards) -> None:
    shards.stage(1)
    good: dict[str, Any] = {"parameters": shards.ref, "request_id": identity(1), "epoch": 0}
    for request, code, field, message in (
        (Push(**good, update=rows(HOME, 1.0)), INVALID, "update", "are sharded over several servers"),
        (Push(parameters=shards.ref), INVALID, "request_id", "expected a request_id"),
        (Push(**good, sum_of=[accumulator_pb2.Summand(weight=-1.0)]), INVALID, "sum_of[0].weight", "positive"),
        (Push(**good, sum_of=[accumulator_pb2.Summand()], metrics={"loss": 1.0}), INVALID, "metrics", "beside those"),
        (Push(**{**good, "request_id": identity(9)}), ABORTED, "update", "is not staged here"),
        (Push(**{**good, "epoch": 3}), ABORTED, "epoch", "staged in epoch 0"),
        (Push(**good, local_step=7), INVALID, "local_step", "expected a local_step of at most 0"),
        (Push(**good, weight=-1.0), INVALID, "weight", "positive"),
    ):
        failure = shards.raw[HOME].fail("Push", request)
        assert (failure.code, failure.field) == (code, field), failure
        assert message in failure.message
    assert shards.push(1).outcome == accumulator_pb2.APPLY_OUTCOME_ACCEPTED


@pytest.mark.parametrize("method", ["Push", "PushPullParameters", "ListRounds", "CountUpdates"])
def test_only_the_home_decides(shards: Shards, method: str) -> None:
    kind: Any = {
        "Push": Push,
        "PushPullParameters": PushPull,
        "ListRounds": Rounds,
        "CountUpdates": messages_pb2.CountUpdatesRequest,
    }[method]
    failure = shards.raw[OTHER].fail(method, kind(parameters=shards.ref))
    assert (failure.code, failure.field) == (INVALID, "parameters.name")
    assert "belong to server 0" in failure.message


def test_bad_stages(shards: Shards) -> None:
    good = shards.staging(OTHER, 1)
    wrong_rows, nan, nobody = Stage(), Stage(), Stage()
    for each in (wrong_rows, nan, nobody):
        each.CopyFrom(good)
    wrong_rows.update[0].CopyFrom(rows(HOME, 1.0)[0])
    nan.update[0].CopyFrom(rows(OTHER, float("nan"))[0])
    nobody.parameters.incarnation = "another"
    for request, code, field in (
        (wrong_rows, INVALID, "update[0].dense.shape"),
        (nan, INVALID, "update[0].dense"),
        (nobody, NOT_FOUND, "parameters.incarnation"),
    ):
        failure = shards.raw[OTHER].fail("StageUpdate", request)
        assert (failure.code, failure.field) == (code, field), failure


def test_a_slow_client_gets_the_version_of_its_round(shards: Shards) -> None:
    """Though many rounds have ended since: the home keeps it for the call, and tells the others so."""
    waiting = PushPull(parameters=shards.ref, request_id=identity(1, "slow"), epoch=0)
    for server in (HOME, OTHER):
        staging = shards.staging(server, 1, 3.0)
        staging.request_id.CopyFrom(waiting.request_id)
        shards.raw[server].call("StageUpdate", staging)
    version = shards.raw[HOME].call("PushPullParameters", waiting).version
    shards.read(OTHER, decided=[version.decided])
    for step in range(1, 6):
        shards.stage(step + 1, step=step)
        shards.push(step + 1, step=step)
        shards.read(OTHER, decided=[shards.latest()])
    for server in (HOME, OTHER):
        assert shards.read(server, step=version.step) == {3.0}
    again = shards.staging(HOME, 9, step=6)
    again.request_id.CopyFrom(identity(2, "slow"))
    shards.raw[HOME].call("StageUpdate", again)
    received = Push(parameters=shards.ref, request_id=again.request_id, local_step=6, epoch=0)
    shards.raw[HOME].call("Push", received)  # which shows that the version has arrived
    failure = shards.raw[HOME].fail("ReadParameters", Read(parameters=shards.ref, step=version.step))
    assert failure.code == grpc.StatusCode.OUT_OF_RANGE


# Rounds


def _no_members(decided: Any) -> None:
    del decided.part_ids[:]


def _unknown(decided: Any) -> None:
    decided.part_ids[0] = bytes(16)


def _short(decided: Any) -> None:
    decided.part_ids[0] = b"short"


def _without_weight(decided: Any) -> None:
    del decided.weights[:]


def _infinite(decided: Any) -> None:
    decided.weights[0] = float("inf")


def _twice(decided: Any) -> None:
    decided.part_ids.append(decided.part_ids[0])
    decided.weights.append(1.0)


def _later(decided: Any) -> None:
    decided.step = 7


def _loaded(decided: Any) -> None:
    del decided.part_ids[:], decided.weights[:]
    decided.loaded = bytes(16)


def _no_optimizer(decided: Any) -> None:
    decided.ClearField("optimizer")


@pytest.mark.parametrize(
    ("forge", "code", "field"),
    [
        (_no_members, INVALID, "decided[0].part_ids"),
        (_unknown, ABORTED, "decided.part_ids"),
        (_short, INVALID, "decided[0].part_ids"),
        (_without_weight, INVALID, "decided[0].part_ids"),
        (_infinite, INVALID, "decided[0].weights"),
        (_twice, INVALID, "decided[0].part_ids"),
        (_later, ABORTED, "decided"),
        (_loaded, ABORTED, "decided.part_ids"),
        (_no_optimizer, INVALID, "decided[0].optimizer"),
        (lambda decided: decided.scales.extend([1.0, 1.0]), INVALID, "decided[0].scales"),
        (lambda decided: decided.scales.append(0.0), INVALID, "decided[0].scales"),
        (lambda decided: decided.scales.append(1.5), INVALID, "decided[0].scales"),
        (lambda decided: decided.factors.append(-1.0), INVALID, "decided[0].factors"),
        (lambda decided: decided.factors.append(math.inf), INVALID, "decided[0].factors"),
        (lambda decided: decided.sums.add(index=1, num_updates=2, discount=1.0), INVALID, "decided[0].sums[0].index"),
        (lambda decided: decided.sums.add(num_updates=0, discount=1.0), INVALID, "decided[0].sums[0].num_updates"),
        (lambda decided: decided.sums.add(num_updates=2, discount=1.5), INVALID, "decided[0].sums[0].discount"),
    ],
)
def test_rounds_that_cannot_be_made_change_nothing(
    shards: Shards, forge: Callable[[Any], None], code: grpc.StatusCode, field: str
) -> None:
    shards.stage(1)
    shards.push(1)
    (decided,) = shards.decided()
    forged = parameters_pb2.DecidedRound()
    forged.CopyFrom(decided)
    forge(forged)
    failure = shards.raw[OTHER].fail("ReadParameters", Read(parameters=shards.ref, decided=[forged]))
    assert (failure.code, failure.field) == (code, field), failure
    assert shards.read(OTHER, decided=[decided]) == {1.0}


def test_rounds_are_for_servers_that_follow(shards: Shards) -> None:
    shards.stage(1)
    shards.push(1)
    decided = shards.decided()
    failure = shards.raw[HOME].fail("ReadParameters", Read(parameters=shards.ref, decided=decided))
    assert (failure.code, failure.field) == (INVALID, "decided")
    failure = shards.raw[OTHER].fail("ReadParameters", Read(parameters=shards.ref, decided=decided * 2))
    assert (failure.code, failure.field) == (INVALID, "decided[1].step")


def test_only_values_are_changed_on_a_server_that_follows(shards: Shards) -> None:
    loading: dict[str, Any] = {"parameters": shards.ref, "request_id": identity(1)}
    for request, field in (
        (Change(parameters=shards.ref, optimizer=SGD), "values"),
        (Change(parameters=shards.ref, values=rows(OTHER, 1.0)), "request_id"),
    ):
        failure = shards.raw[OTHER].fail("ChangeParameters", request)
        assert (failure.code, failure.field) == (INVALID, field), failure
    shards.raw[OTHER].call("ChangeParameters", Change(**loading, values=rows(OTHER, 4.0)))
    assert shards.read(OTHER) == {0.0}, "the home has not decided"
    shards.raw[HOME].call("ChangeParameters", Change(**loading, values=rows(HOME, 4.0)))
    decided = shards.decided()
    assert [each.step for each in decided] == [1]
    assert shards.read(OTHER, decided=decided) == {4.0}


def test_parameters_on_one_server_have_no_shards(raw: list[RawCalls]) -> None:
    raw[HOME].call(
        "CreateParameters",
        Create(
            parameters=ref(NAME), spec=spec(component("w", dims=[3, 2])), values=[dense(tensor(np.zeros((3, 2))), "w")]
        ),
    )
    for method, request in (
        ("StageUpdate", Stage(parameters=ref(NAME), request_id=identity(1), update=rows(HOME, 1.0))),
        ("CountUpdates", messages_pb2.CountUpdatesRequest(parameters=ref(NAME))),
        ("ForgetUpdates", messages_pb2.ForgetUpdatesRequest(parameters=ref(NAME))),
    ):
        assert raw[HOME].fail(method, request).code == INVALID
    failure = raw[HOME].fail("CreateParameters", Create(parameters=ref(NAME), spec=sharded(), creator="one"))
    assert (failure.code, "num_shards is 0, not 2" in failure.message) == (EXISTS, True), failure
