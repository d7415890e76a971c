"""ParameterService of a running server, over gRPC."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest
from google.protobuf.duration_pb2 import Duration

from gradserve_protocol.v1 import accumulator_pb2, lease_pb2, parameters_pb2, tensor_messages_pb2, tensor_pb2
from gradserve_protocol.v1 import parameters_messages_pb2 as messages_pb2
from gradserve_server.config import ServerConfig
from gradserve_testing import LocalServer
from tests.bad_input.requests import identity
from tests.rpc.parameters.requests import (
    MOMENTUM,
    Change,
    Delete,
    Fork,
    Get,
    List,
    Push,
    Read,
    Rounds,
    create,
    numbers_in,
    push,
    push_pull,
    ref,
    spec,
    summands,
    values,
)
from tests.servers.polling import PATIENCE_SECONDS
from tests.servers.raw_calls import RawCalls
from tests.servers.runtime import NOT_WARMED_UP

TWO = parameters_pb2.RoundRules(num_required=2)
KEEP = tensor_pb2.Placement(mode=tensor_pb2.Placement.MODE_KEEP)
ACCEPTED, STALE, COUNTED = (
    accumulator_pb2.APPLY_OUTCOME_ACCEPTED,
    accumulator_pb2.APPLY_OUTCOME_STALE,
    accumulator_pb2.APPLY_OUTCOME_ALREADY_COUNTED,
)
NOT_FOUND, EXISTS = grpc.StatusCode.NOT_FOUND, grpc.StatusCode.ALREADY_EXISTS
INVALID = grpc.StatusCode.INVALID_ARGUMENT


@pytest.fixture
def raw() -> Iterator[RawCalls]:
    with LocalServer(ServerConfig(runtime=NOT_WARMED_UP)) as local, RawCalls(local.address) as calls:
        yield calls


def step_of(raw: RawCalls, name: str = "net") -> int:
    return int(raw.call("GetParameters", Get(parameters=ref(name))).info.step)


def newest(raw: RawCalls, name: str = "net") -> parameters_pb2.Version:
    version: parameters_pb2.Version = raw.call("ReadParameters", Read(parameters=ref(name))).version
    return version


# By name


def test_the_first_call_creates_and_others_find(raw: RawCalls) -> None:
    made = raw.call("CreateParameters", create(values=values(1.0, 2.0), step=5))
    assert (made.created, made.info.step, made.info.parameters.name) == (True, 5, "net")
    found = raw.call("CreateParameters", create(values=values(3.0, 4.0)))
    assert (found.created, found.info) == (False, made.info)
    assert numbers_in(newest(raw)) == {"w": {1.0}, "b": {2.0}}


def test_a_call_without_values_only_finds(raw: RawCalls) -> None:
    assert raw.fail("CreateParameters", create(values=[])).code is NOT_FOUND
    raw.call("CreateParameters", create())
    assert not raw.call("CreateParameters", create(values=[])).created


def test_one_of_two_creators_sends_values(raw: RawCalls) -> None:
    assert raw.fail("CreateParameters", create(values=[], creator="a")).code is NOT_FOUND
    assert raw.fail("CreateParameters", create(values=[], creator="a")).code is NOT_FOUND, "it may ask again"
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(raw.call, "CreateParameters", create(values=[], creator="b"))
        assert raw.call("CreateParameters", create(creator="a")).created
        assert not waiting.result(PATIENCE_SECONDS).created


def test_the_next_creator_has_the_turn_when_one_fails(raw: RawCalls) -> None:
    assert raw.fail("CreateParameters", create(values=[], creator="a")).code is NOT_FOUND
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(raw.fail, "CreateParameters", create(values=[], creator="b"))
        assert raw.fail("CreateParameters", create(values=values()[:1], creator="a")).code is INVALID
        assert waiting.result(PATIENCE_SECONDS).code is NOT_FOUND
    assert raw.call("CreateParameters", create(creator="b")).created


def test_who_has_no_values_waits_for_nobody(raw: RawCalls) -> None:
    assert raw.fail("CreateParameters", create(values=[], creator="a")).code is NOT_FOUND
    assert raw.fail("CreateParameters", create(values=[])).code is NOT_FOUND


def test_another_spec_is_another_thing(raw: RawCalls) -> None:
    raw.call("CreateParameters", create())
    failure = raw.fail("CreateParameters", create(spec=spec(keep_versions=3)))
    assert (failure.code, failure.field) == (EXISTS, "spec")
    assert "keep_versions is 2, not 3" in failure.message


def test_other_rules_are_not(raw: RawCalls) -> None:
    raw.call("CreateParameters", create())
    found = raw.call("CreateParameters", create(spec=spec(optimizer=MOMENTUM, rounds=TWO)))
    assert (found.created, found.info.spec.rounds.num_required) == (False, 1)


def test_the_description(raw: RawCalls) -> None:
    asked = spec(
        optimizer=MOMENTUM,
        schedule=parameters_pb2.Schedule(warmup=2, linear=parameters_pb2.LinearSchedule(rounds=10, end=0.5)),
        rounds=parameters_pb2.RoundRules(num_required=3, expected_count=4, grace=Duration(seconds=2)),
        staleness=parameters_pb2.Staleness(max=4, polynomial=parameters_pb2.PolynomialDiscount(exponent=0.5)),
        clip_norm=3.0,
        many_per_worker=True,
        agreement={"model": "net"},
        keep_versions=3,
    )
    raw.call("CreateParameters", create(spec=asked, lifetime=lease_pb2.Lifetime(idle_lease=Duration(seconds=60))))
    raw.call("Push", push(worker_id="a", weight=2.0))
    info = raw.call("GetParameters", Get(parameters=ref())).info
    assert [(each.name, list(each.shape.dims)) for each in info.spec.components] == [("w", [2, 3]), ("b", [3])]
    for field in ("optimizer", "schedule", "staleness", "clip_norm", "many_per_worker", "agreement"):
        assert getattr(info.spec, field) == getattr(asked, field), field
    assert (info.spec.rounds.num_required, info.spec.rounds.expected_count) == (3, 4)
    assert (info.spec.keep_versions, info.spec.keep_rounds) == (3, 1000)
    assert (info.step, info.num_updates, list(info.worker_ids), list(info.kept_steps)) == (0, 1, ["a"], [0])
    assert (info.weights.accepted, info.weights.applied, info.weights.pending) == (2.0, 0.0, 2.0)
    assert (info.is_private, info.idle_lease.seconds) == (False, 60)
    assert info.digest == newest(raw).digest
    assert info.num_bytes > 0


def test_a_list_has_pages_sorted_by_name(raw: RawCalls) -> None:
    for name in ("c", "a", "b"):
        raw.call("CreateParameters", create(name))
    first = raw.call("ListParameters", List(page_size=2))
    assert [each.parameters.name for each in first.parameters] == ["a", "b"]
    rest = List(page_size=2, page_token=first.next_page_token)
    second = raw.call("ListParameters", rest)
    assert ([each.parameters.name for each in second.parameters], second.next_page_token) == (["c"], "")
    assert not raw.call("ListParameters", List(container="other")).parameters


def test_deleted_parameters_are_gone(raw: RawCalls) -> None:
    incarnation = raw.call("CreateParameters", create()).info.parameters.incarnation
    delete = Delete(parameters=ref())
    assert raw.call("DeleteParameters", delete).deleted
    assert not raw.call("DeleteParameters", delete).deleted
    assert raw.fail("Push", push()).code is NOT_FOUND
    raw.call("CreateParameters", create())
    earlier = Push(parameters=ref(incarnation=incarnation), update=values(1.0, 1.0))
    assert raw.fail("Push", earlier).code is NOT_FOUND


def test_a_call_for_another_run_of_the_server(raw: RawCalls) -> None:
    raw.call("CreateParameters", create())
    failure = raw.fail("GetParameters", Get(parameters=ref(server_incarnation="other")))
    assert (failure.code, failure.field) == (grpc.StatusCode.ABORTED, "parameters.server_incarnation")
    failure = raw.fail("GetParameters", Get(parameters=ref(member="train 0/2")))
    assert (failure.code, failure.field) == (grpc.StatusCode.INVALID_ARGUMENT, "parameters.member")


# Rounds


def test_a_push_moves_the_parameters(raw: RawCalls) -> None:
    raw.call("CreateParameters", create(spec=spec(rounds=TWO)))
    first = raw.call("Push", push(worker_id="a"))
    assert (first.outcome, first.step, first.num_updates, first.weight) == (ACCEPTED, 0, 1, 1.0)
    assert first.round == first.num_rounds + 1
    raw.call("Push", push(worker_id="b", update=values(4.0, 1.0), weight=2.0))
    assert step_of(raw) == 1
    assert numbers_in(newest(raw)) == {"w": {3.0}, "b": {1.0}}


def test_an_update_of_some_components(raw: RawCalls) -> None:
    raw.call("CreateParameters", create(values=values(5.0, 5.0)))
    raw.call("Push", push(update=values(1.0)[:1]))
    assert numbers_in(newest(raw)) == {"w": {6.0}, "b": {5.0}}


def test_a_repeated_push_counts_once(raw: RawCalls) -> None:
    raw.call("CreateParameters", create())
    first = raw.call("Push", push(sequence=1, weight=3.0))
    again = raw.call("Push", push(sequence=1, weight=3.0))
    assert (first.duplicate, again.duplicate) == (False, True)
    assert (again.step, again.weight, again.round, step_of(raw)) == (first.step, 3.0, first.round, 1)
    assert raw.fail("Push", push(sequence=1, weight=2.0)).field == "request_id"


def test_all_who_push_and_pull_get_the_version_of_their_round(raw: RawCalls) -> None:
    raw.call("CreateParameters", create(spec=spec(rounds=TWO)))
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(raw.call, "PushPullParameters", push_pull(worker_id=each)) for each in ("a", "b")]
        answers = [each.result() for each in calls]
    for answer in answers:
        assert (answer.outcome, answer.version.step, answer.weight, answer.staleness) == (ACCEPTED, 1, 1.0, 0)
        assert set(answer.version.worker_ids) == {"a", "b"}
        assert numbers_in(answer.version) == {"w": {1.0}, "b": {1.0}}
    assert answers[0].version == answers[1].version == newest(raw)


def test_a_stale_update_gets_the_newest_version(raw: RawCalls) -> None:
    raw.call("CreateParameters", create())
    raw.call("Push", push())
    pushed = raw.call("Push", push(worker_id="late"))
    assert (pushed.outcome, pushed.staleness, pushed.weight, pushed.round) == (STALE, 1, 0.0, 0)
    pulled = raw.call("PushPullParameters", push_pull(worker_id="late"))
    assert (pulled.outcome, pulled.staleness, pulled.version) == (STALE, 1, newest(raw))


def test_staleness_costs_weight(raw: RawCalls) -> None:
    staleness = parameters_pb2.Staleness(max=1, exponential=parameters_pb2.ExponentialDiscount(base=0.5))
    raw.call("CreateParameters", create(spec=spec(staleness=staleness)))
    raw.call("Push", push())
    pushed = raw.call("Push", push(weight=4.0))
    assert (pushed.outcome, pushed.staleness, pushed.weight) == (ACCEPTED, 1, 2.0)


def test_a_worker_counts_once(raw: RawCalls) -> None:
    raw.call("CreateParameters", create(spec=spec(rounds=TWO)))
    raw.call("Push", push(worker_id="a"))
    assert raw.call("Push", push(worker_id="a")).outcome == COUNTED


def test_a_sum_counts_as_its_updates(raw: RawCalls) -> None:
    raw.call("CreateParameters", create(spec=spec(rounds=parameters_pb2.RoundRules(num_required=3))))
    pushed = raw.call("Push", push(update=values(4.0, 8.0), sum_of=summands(1.0, 3.0), sequence=1))
    assert (pushed.outcome, pushed.num_updates, pushed.weight) == (ACCEPTED, 2, 4.0)
    alone = push(weight=3.0, worker_id="b")
    alone.request_id.CopyFrom(identity(1, "b"))
    again = raw.call("Push", alone)
    assert (again.duplicate, again.weight, again.num_updates) == (True, 3.0, 2)
    failure = raw.fail("Push", push(sum_of=summands(1.0), sequence=2))
    assert (failure.code, failure.field) == (grpc.StatusCode.ABORTED, "sum_of")
    raw.call("Push", push(update=values(4.0, 0.0), worker_id="c", weight=4.0))
    version = newest(raw)
    assert numbers_in(version) == {"w": {2.5}, "b": {1.0}}
    assert (version.num_updates, version.total_weight, list(version.worker_ids)) == (3, 8.0, list("abc"))
    (record,) = raw.call("ListRounds", Rounds(parameters=ref())).rounds
    assert [(each.worker_id, each.weight, each.num_bytes) for each in record.updates] == [
        ("a", 1.0, 36),
        ("b", 3.0, 36),
        ("c", 4.0, 36),
    ]


def test_a_push_pull_without_values(raw: RawCalls) -> None:
    raw.call("CreateParameters", create())
    response = raw.call("PushPullParameters", push_pull(without_values=True, sum_of=summands(2.0, 2.0)))
    assert (response.outcome, response.weight, response.version.step) == (ACCEPTED, 4.0, 1)
    assert (list(response.version.components), response.version.digest) == ([], newest(raw).digest)


def test_a_round_that_does_not_end_in_time(raw: RawCalls) -> None:
    raw.call("CreateParameters", create(spec=spec(rounds=TWO)))
    request = push_pull(worker_id="a", timeout=Duration(nanos=10**8), request_id=identity(1))
    assert raw.fail("PushPullParameters", request).code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert raw.call("GetParameters", Get(parameters=ref())).info.num_updates == 1


# Versions


@pytest.mark.parametrize("local_step", [-(2**63), -1, 4])
@pytest.mark.parametrize("method", ["Push", "PushPullParameters"])
def test_no_update_comes_from_a_version_that_does_not_exist(raw: RawCalls, method: str, local_step: int) -> None:
    """The number of versions since then would be greater than any that an answer can have."""
    raw.call("CreateParameters", create(step=3))
    request = (push if method == "Push" else push_pull)(local_step=local_step)
    failure = raw.fail(method, request)
    assert (failure.code, failure.field) == (grpc.StatusCode.INVALID_ARGUMENT, "local_step")


def test_a_version_by_its_step(raw: RawCalls) -> None:
    raw.call("CreateParameters", create())
    digests = [newest(raw).digest]
    for step in range(3):
        raw.call("Push", push(local_step=step))
        digests.append(newest(raw).digest)
    assert len(set(digests)) == 4
    assert {len(each) for each in digests} == {16}
    version = raw.call("ReadParameters", Read(parameters=ref(), step=2)).version
    assert (version.step, version.num_updates, version.total_weight, version.digest) == (2, 1, 1.0, digests[2])
    assert raw.fail("ReadParameters", Read(parameters=ref(), step=1)).code is grpc.StatusCode.OUT_OF_RANGE
    late = Read(parameters=ref(), step=4, timeout=Duration(nanos=10**7))
    assert raw.fail("ReadParameters", late).code is grpc.StatusCode.DEADLINE_EXCEEDED


def test_a_future_step_is_waited_for(raw: RawCalls) -> None:
    raw.call("CreateParameters", create())
    waiting = raw.start("ReadParameters", Read(parameters=ref(), step=1))
    raw.call("Push", push())
    answer = messages_pb2.ReadParametersResponse.FromString(waiting.result())
    assert answer.version == newest(raw)


def test_a_version_without_values(raw: RawCalls) -> None:
    raw.call("CreateParameters", create())
    version = raw.call("ReadParameters", Read(parameters=ref(), without_values=True)).version
    assert (list(version.components), version.digest) == ([], newest(raw).digest)


def test_a_version_under_handles(raw: RawCalls) -> None:
    raw.call("CreateParameters", create(values=values(1.0, 2.0)))
    version = raw.call("ReadParameters", Read(parameters=ref(), placement=KEEP)).version
    handles = [each.dense.handle for each in version.components]
    header, *chunks = raw.call("GetTensors", tensor_messages_pb2.GetTensorsRequest(handles=handles))
    assert [list(each.shape) for each in header.header.tensors] == [[2, 3], [3]]
    elements = np.frombuffer(b"".join(each.chunk for each in chunks), np.float32)
    assert elements.tolist() == [1.0] * 6 + [2.0] * 3


def test_values_and_updates_under_handles(raw: RawCalls) -> None:
    raw.call("CreateParameters", create("source", values=values(2.0, 2.0)))
    kept = raw.call("ReadParameters", Read(parameters=ref("source"), placement=KEEP)).version.components
    raw.call("CreateParameters", create(values=kept))
    assert numbers_in(newest(raw)) == {"w": {2.0}, "b": {2.0}}
    raw.call("Push", push(update=kept, release_handles=True))
    assert numbers_in(newest(raw)) == {"w": {4.0}, "b": {4.0}}
    assert raw.fail("Push", push(update=kept, local_step=1)).code is NOT_FOUND


@pytest.mark.parametrize("without_values", [False, True])
def test_the_state_of_the_optimizer(raw: RawCalls, *, without_values: bool) -> None:
    raw.call("CreateParameters", create(spec=spec(optimizer=MOMENTUM)))
    raw.call("Push", push(update=values(2.0)[:1]))
    read = Read(parameters=ref(), with_state=True, without_values=without_values)
    version = raw.call("ReadParameters", read).version
    assert numbers_in(version) == ({} if without_values else {"w": {2.0}, "b": {0.0}})
    assert [(each.name, each.component) for each in version.state.slots] == [
        ("momentum_buffer", "w"),
        ("momentum_buffer", "b"),
    ]
    buffers = [set(np.frombuffer(each.value.content, np.float32).tolist()) for each in version.state.slots]
    assert buffers == [{-2.0}, {0.0}]  # the gradient is the negated delta
    assert (list(version.state.component_steps), version.state.rounds) == ([1, 0], 1)
    assert version.state.optimizer == MOMENTUM
    assert version.digest == newest(raw).digest


def test_the_state_is_that_of_the_newest_version(raw: RawCalls) -> None:
    raw.call("CreateParameters", create())
    failure = raw.fail("ReadParameters", Read(parameters=ref(), with_state=True, step=0))
    assert (failure.code, failure.field) == (grpc.StatusCode.INVALID_ARGUMENT, "with_state")


def test_a_saved_run_goes_on(raw: RawCalls) -> None:
    def pushed(name: str) -> parameters_pb2.Version:
        raw.call("Push", push(name, local_step=step_of(raw, name)))
        return newest(raw, name)

    raw.call("CreateParameters", create("first", spec=spec(optimizer=MOMENTUM)))
    for _ in range(2):
        pushed("first")
    saved = raw.call("ReadParameters", Read(parameters=ref("first"), with_state=True)).version
    raw.call(
        "CreateParameters",
        create("second", spec=spec(optimizer=MOMENTUM), values=saved.components, step=saved.step, state=saved.state),
    )
    raw.call("CreateParameters", create("other", spec=spec(optimizer=MOMENTUM), values=saved.components))
    assert step_of(raw, "second") == 2
    assert pushed("first").digest == pushed("second").digest != pushed("other").digest


# Changes


def test_rules_change(raw: RawCalls) -> None:
    raw.call("CreateParameters", create())
    changed = raw.call("ChangeParameters", Change(parameters=ref(), optimizer=MOMENTUM, rounds=TWO)).info
    assert (changed.spec.optimizer, changed.spec.rounds.num_required, changed.step) == (MOMENTUM, 2, 0)
    raw.call("Push", push())
    assert step_of(raw) == 0


def test_a_version_is_loaded(raw: RawCalls) -> None:
    raw.call("CreateParameters", create())
    raw.call("Push", push())
    load = Change(parameters=ref(), values=values(7.0, 8.0), request_id=identity(1))
    assert raw.call("ChangeParameters", load).info.step == 2
    assert raw.call("ChangeParameters", load).info.step == 2
    assert numbers_in(newest(raw)) == {"w": {7.0}, "b": {8.0}}
    assert raw.call("ChangeParameters", Change(parameters=ref(), values=values(), step=10)).info.step == 10


# Records and forks


def test_records_of_rounds(raw: RawCalls) -> None:
    raw.call("CreateParameters", create(spec=spec(rounds=TWO)))
    digests = [newest(raw).digest]
    for step in range(2):
        raw.call("Push", push(worker_id="a", local_step=step, weight=2.0))
        raw.call("Push", push(worker_id="a", local_step=step))
        raw.call("Push", push(worker_id="b", local_step=step))
        digests.append(newest(raw).digest)
    found = raw.call("ListRounds", Rounds(parameters=ref()))
    assert ([each.step for each in found.rounds], found.has_more) == ([1, 2], False)
    for step, record in enumerate(found.rounds):
        assert (record.reason, record.digest_before, record.digest_after) == ("required", *digests[step : step + 2])
        assert [(each.worker_id, each.weight_asked, each.weight) for each in record.updates] == [
            ("a", 2.0, 2.0),
            ("b", 1.0, 1.0),
        ]
        assert [(each.worker_id, each.reason) for each in record.refusals] == [("a", "already counted")]
        assert (record.lr, record.optimizer, len(record.hash)) == (1.0, spec().optimizer, 32)
        assert record.end_time.seconds > 1_600_000_000
        assert not record.updates[0].HasField("norm")
    first = raw.call("ListRounds", Rounds(parameters=ref(), page_size=1))
    assert ([each.step for each in first.rounds], first.has_more) == ([1], True)
    assert [each.step for each in raw.call("ListRounds", Rounds(parameters=ref(), since=1)).rounds] == [2]


def test_a_fork_goes_its_own_way(raw: RawCalls) -> None:
    raw.call("CreateParameters", create(spec=spec(optimizer=MOMENTUM)))
    raw.call("Push", push())
    fork = Fork(parameters=ref(), fork=ref("branch"))
    made = raw.call("ForkParameters", fork).info
    assert (made.step, made.parameters.name, made.digest) == (1, "branch", newest(raw).digest)
    assert raw.call("ForkParameters", fork).info == made
    for name in ("net", "branch"):
        raw.call("Push", push(name, local_step=1))
    assert newest(raw).digest == newest(raw, "branch").digest
    raw.call("Push", push("branch", local_step=2))
    assert (step_of(raw), step_of(raw, "branch")) == (2, 3)


def test_a_fork_of_an_older_version(raw: RawCalls) -> None:
    raw.call("CreateParameters", create(spec=spec(optimizer=MOMENTUM)))
    digest = newest(raw).digest
    raw.call("Push", push())
    made = raw.call("ForkParameters", Fork(parameters=ref(), step=0, fork=ref("branch"))).info
    assert (made.step, made.digest) == (0, digest)
    gone = raw.fail("ForkParameters", Fork(parameters=ref(), step=7, fork=ref("future")))
    assert gone.code is grpc.StatusCode.OUT_OF_RANGE


def test_a_fork_needs_a_name_of_its_own(raw: RawCalls) -> None:
    raw.call("CreateParameters", create())
    failure = raw.fail("ForkParameters", Fork(parameters=ref(), fork=ref("")))
    assert (failure.code, failure.field) == (grpc.StatusCode.INVALID_ARGUMENT, "fork.name")
    raw.call("CreateParameters", create("other", spec=spec(keep_versions=5)))
    assert raw.fail("ForkParameters", Fork(parameters=ref(), fork=ref("other"))).code is EXISTS
