"""What a client says to which server about a sharded accumulator, and what it does about their answers."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import gradserve
from gradserve import DenseSpec, IndexedSlices, SparseSpec
from gradserve.calls.accumulators.sharding.shard import LOST_FIELD
from gradserve.calls.client import ClientCalls
from gradserve.calls.exchange import Background, Exchange, Pause, TimeLimits, Unary, Whole
from gradserve_protocol.errors import (
    AbortedError,
    DeadlineExceededError,
    GradserveError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
)
from gradserve_protocol.placement import home_of
from gradserve_protocol.tensors import WithContents
from gradserve_protocol.v1 import accumulator_messages_pb2 as messages_pb2
from gradserve_protocol.v1 import accumulator_pb2, server_messages_pb2, tensor_pb2
from tests.client.fake_transport import FakeTransport
from tests.cluster.servers import name_at
from tests.cluster.sharding.clients import small_pieces
from tests.servers.connecting import client_over

SIZE = 3
HOME = 1
NAME = name_at(HOME, SIZE)
MODEL = {"w": DenseSpec("float32", (6, 2)), "b": DenseSpec("float32", ()), "t": SparseSpec("float32", (None, 2))}
GRADIENT = {
    "w": np.arange(12, dtype=np.float32).reshape(6, 2),
    "b": np.float32(1),
    "t": IndexedSlices(np.ones((1, 2), np.float32), np.array([4])),
}
AVERAGE = accumulator_pb2.Average(
    step=8,
    num_gradients=2,
    total_weight=2.0,
    round=4,
    parts=accumulator_pb2.RoundParts(home_incarnation="home-1", part_ids=[b"1" * 16, b"2" * 16], weights=[1.0, 1.0]),
)
LOST = AbortedError("lost", field=LOST_FIELD)
EARLIER = AbortedError("it was deleted", field="home_incarnation")


class Servers:
    """Servers that answer a client, and note what it asks.

    Attributes:
        log: "METHOD SERVER" of each call, and "pause SECONDS".
        requests: The requests of each line.
        errors: Errors with which calls end, by their lines, None for none: the first one, then the next, and then no
            more.
        epoch: The accumulator's epoch.
        asking: The servers that ask about old gradients.
        incarnations: Those of the accumulator at its home: each creation goes on to the next one, if there is one.
    """

    def __init__(self) -> None:
        self.log: list[str] = []
        self.requests: list[Any] = []
        self.errors: dict[str, list[GradserveError | None]] = {}
        self.outcome = accumulator_pb2.APPLY_OUTCOME_ACCEPTED
        self.incarnations = ["none", "home-1"]
        self.spec = accumulator_pb2.AccumulatorSpec()
        self.epoch = 3
        self.asking: set[int] = set()
        self._replies: dict[str, Callable[[int, Any], Any]] = {
            "GetServerInfo": self._server_info,
            "CreateAccumulator": self._create,
            "GetAccumulator": self._describe,
            "DeleteAccumulator": self._delete,
            "GetNumAccumulated": self._count,
            "StageGradient": self._stage,
            "ApplyGradient": self._apply,
            "PushPull": self._push_pull,
            "TakeGradient": self._take,
            "ReduceGradients": self._reduce,
            "SetGlobalStep": lambda *_: messages_pb2.SetGlobalStepResponse(),
            "ReadAverage": lambda *_: messages_pb2.ReadAverageResponse(average=AVERAGE),
            "EndEpoch": lambda *_: messages_pb2.EndEpochResponse(epoch=self._next_epoch(), part_ids=[b"1" * 16]),
            "ForgetGradients": lambda *_: messages_pb2.ForgetGradientsResponse(),
        }

    def since(self, mark: int) -> list[str]:
        return self.log[mark:]

    def answer(self, exchange: Exchange) -> Any:
        if isinstance(exchange, Pause):
            self.log.append(f"pause {exchange.seconds:g}")
            self.requests.append(None)
            return None
        if isinstance(exchange, Background):
            return None
        assert isinstance(exchange, Unary | Whole), exchange
        call = exchange.call if isinstance(exchange, Whole) else exchange
        request: Any = call.request.message if isinstance(call.request, WithContents) else call.request
        line = f"{call.method} {call.target}"
        self.log.append(line)
        self.requests.append(request)
        if call.method != "GetServerInfo":
            assert request.accumulator.member == f"train {call.target}/{SIZE}"
        if self.errors.get(line) and (error := self.errors[line].pop(0)) is not None:
            raise error
        return self._replies[call.method](call.target, request)

    def _server_info(self, target: int, _request: Any) -> Any:
        member = server_messages_pb2.ClusterMember(cluster="train", index=target, size=SIZE)
        return server_messages_pb2.GetServerInfoResponse(member=member)

    def _create(self, target: int, request: Any) -> Any:
        if target == HOME:
            self.incarnations = self.incarnations[1:] or self.incarnations
            self.spec.CopyFrom(request.spec)
            self.spec.durability = accumulator_pb2.DURABILITY_ROUND
        return messages_pb2.CreateAccumulatorResponse(info=self._info(request), created=True)

    def _describe(self, target: int, request: Any) -> Any:
        info = self._info(request)
        info.num_bytes = 10**target
        return messages_pb2.GetAccumulatorResponse(info=info)

    def _delete(self, target: int, _request: Any) -> Any:
        gone = "gone-1" if target == HOME else ""
        return messages_pb2.DeleteAccumulatorResponse(deleted=target == HOME, home_incarnation=gone)

    def _count(self, _target: int, _request: Any) -> Any:
        return messages_pb2.GetNumAccumulatedResponse(num_accumulated=5, epoch=self.epoch)

    def _next_epoch(self) -> int:
        self.epoch += 1
        return self.epoch

    def _stage(self, target: int, _request: Any) -> Any:
        return messages_pb2.StageGradientResponse(has_old_gradients=target in self.asking)

    def _apply(self, _target: int, _request: Any) -> Any:
        return messages_pb2.ApplyGradientResponse(outcome=self.outcome, global_step=7, round=4, num_rounds=3)

    def _push_pull(self, _target: int, _request: Any) -> Any:
        return messages_pb2.PushPullResponse(outcome=self.outcome, average=AVERAGE, global_step=8)

    def _take(self, _target: int, _request: Any) -> Any:
        return messages_pb2.TakeGradientResponse(average=AVERAGE)

    def _reduce(self, target: int, request: Any) -> Any:
        assert request.average == AVERAGE
        rows = dict(_pieces(self.spec, "w"))
        average = accumulator_pb2.Average()
        average.CopyFrom(AVERAGE)
        average.ClearField("parts")
        for component in self.spec.components:
            for piece in component.pieces:
                if piece.server == target:
                    part = average.components.add(name=component.name)
                    if component.layout == accumulator_pb2.LAYOUT_SPARSE:
                        part.sparse.indices.CopyFrom(_tensor(np.array([4])))
                        part.sparse.values.CopyFrom(_tensor(np.ones((1, 2), np.float32)))
                        part.sparse.dense_shape.dims.extend([-1, 2])
                    elif component.name == "w":
                        part.dense.CopyFrom(_tensor(np.full((rows[target], 2), target, np.float32)))
                    else:
                        part.dense.CopyFrom(_tensor(np.ones((), np.float32)))
        return messages_pb2.ReduceGradientsResponse(average=average)

    def _info(self, request: Any) -> accumulator_pb2.AccumulatorInfo:
        info = accumulator_pb2.AccumulatorInfo(
            accumulator=request.accumulator,
            spec=self.spec,
            server_incarnation="run-1",
            global_step=7,
            epoch=self.epoch,
        )
        info.accumulator.container = "default"
        info.accumulator.incarnation = self.incarnations[0]
        return info


def _tensor(array: Any) -> tensor_pb2.Tensor:
    data_type = tensor_pb2.DATA_TYPE_INT64 if array.dtype == np.int64 else tensor_pb2.DATA_TYPE_FLOAT32
    return tensor_pb2.Tensor(dtype=data_type, shape=array.shape, content=array.tobytes())


def _pieces(spec: accumulator_pb2.AccumulatorSpec, name: str) -> list[tuple[int, int]]:
    (component,) = (each for each in spec.components if each.name == name)
    return [(piece.server, piece.num_rows) for piece in component.pieces]


@pytest.fixture
def servers() -> Servers:
    return Servers()


@pytest.fixture
def client(servers: Servers) -> Iterator[gradserve.Client]:
    calls = ClientCalls.of_new_client(TimeLimits(), addresses=["a:1", "b:1", "c:1"])
    with small_pieces():
        yield client_over(FakeTransport(servers.answer), "nowhere", calls)


@pytest.fixture
def net(client: gradserve.Client) -> gradserve.GradientAccumulator:
    return client.gradient_accumulator(MODEL, NAME, sharded=True)


def test_the_home_comes_first_and_all_get_its_durability(servers: Servers, net: gradserve.GradientAccumulator) -> None:
    assert net.name == NAME
    assert home_of("", NAME, SIZE) == HOME
    creations = [line for line in servers.log if line.startswith("Create")]
    assert creations == ["CreateAccumulator 1", "CreateAccumulator 0", "CreateAccumulator 2"]
    requests = [each for each in servers.requests if isinstance(each, messages_pb2.CreateAccumulatorRequest)]
    assert [each.spec.durability for each in requests] == [
        accumulator_pb2.DURABILITY_UNSPECIFIED,
        accumulator_pb2.DURABILITY_ROUND,
        accumulator_pb2.DURABILITY_ROUND,
    ]
    assert [each.home_incarnation for each in requests] == ["", "home-1", "home-1"]
    for each in requests:
        assert (each.spec.num_shards, each.spec.device) == (SIZE, "cpu")
        assert _pieces(each.spec, "w") == [(1, 2), (2, 2), (0, 2)]
        assert [count for _, count in _pieces(each.spec, "b")] == [0]
        assert [count for _, count in _pieces(each.spec, "t")] == [0]


def _made(servers: Servers) -> list[tuple[str, str]]:
    return [
        (line, request.home_incarnation)
        for line, request in zip(servers.log, servers.requests, strict=True)
        if line.startswith("Create")
    ]


def test_what_was_deleted_while_it_was_made_is_made_again(servers: Servers, client: gradserve.Client) -> None:
    servers.incarnations = ["none", "home-1", "home-2"]
    servers.errors["CreateAccumulator 0"] = [EARLIER]
    client.gradient_accumulator(MODEL, NAME, sharded=True)
    assert _made(servers) == [
        *[("CreateAccumulator 1", ""), ("CreateAccumulator 0", "home-1")],
        *[("CreateAccumulator 1", ""), ("CreateAccumulator 0", "home-2"), ("CreateAccumulator 2", "home-2")],
    ]


def test_what_is_refused_though_the_home_has_it_is_an_error(servers: Servers, client: gradserve.Client) -> None:
    """Its clock was set back."""
    servers.errors["CreateAccumulator 0"] = [EARLIER] * 100
    with pytest.raises(AbortedError, match=r"^it was deleted \[GS_\w+\]$"):
        client.gradient_accumulator(MODEL, NAME, sharded=True)
    assert [line for line, _ in _made(servers)] == ["CreateAccumulator 1", "CreateAccumulator 0"] * 2


@pytest.mark.parametrize("method", ["StageGradient", "ReduceGradients"])
@pytest.mark.parametrize("is_there", [False, True])
def test_a_server_that_knows_a_later_accumulator(
    servers: Servers, net: gradserve.GradientAccumulator, method: str, *, is_there: bool
) -> None:
    """The home says what has become of the earlier one; nothing is made again."""
    field = "home_incarnation" if method == "StageGradient" else "average.parts.home_incarnation"
    refused = AbortedError("it was deleted", field=field)
    servers.errors[f"{method} 0"] = [refused] * 2
    error: GradserveError = refused
    if not is_there:
        error = NotFoundError("another one has this name now")
        servers.errors["GetNumAccumulated 1"] = [error]
    mark = len(servers.log)
    with pytest.raises(type(error)) as raised:
        net.push_pull(GRADIENT, 2, 7)
    assert raised.value is error
    assert servers.since(mark)[-2:] == [f"{method} 0", "GetNumAccumulated 1"]


def test_what_is_deleted_while_a_server_gets_it_again(servers: Servers, net: gradserve.GradientAccumulator) -> None:
    servers.errors["StageGradient 0"] = [NotFoundError("none")]
    servers.errors["CreateAccumulator 0"] = [EARLIER]
    servers.errors["GetNumAccumulated 1"] = [None, NotFoundError("another one has this name now")]
    with pytest.raises(NotFoundError, match="another one has this name now"):
        net.apply_grad(GRADIENT, 7)


def test_a_gradient_is_staged_before_the_home_is_asked(servers: Servers, net: gradserve.GradientAccumulator) -> None:
    mark = len(servers.log)
    net.apply_grad(GRADIENT, 7, weight=3.0, worker_id="a")
    assert servers.since(mark) == ["StageGradient 0", "StageGradient 1", "StageGradient 2", "ApplyGradient 1"]
    *staged, applied = servers.requests[mark:]
    assert (applied.local_step, applied.weight, applied.worker_id, len(applied.gradient)) == (7, 3.0, "a", 0)
    names = []
    for each in staged:
        assert each.request_id.client_id == applied.request_id.client_id
        assert each.request_id.sequence == applied.request_id.sequence
        assert (each.home_incarnation, each.local_step, each.release_handles) == ("home-1", 7, True)
        assert not each.accumulator.incarnation
        assert not each.accumulator.server_incarnation
        names += [part.name for part in each.gradient]
    assert sorted(names) == ["b", "t", "w", "w", "w"]
    of_one = {part.name: part.dense for part in staged[1].gradient}
    assert of_one["w"].content == GRADIENT["w"][:2].tobytes()  # type: ignore[index]


def test_an_average_is_asked_of_all_servers(servers: Servers, net: gradserve.GradientAccumulator) -> None:
    mark = len(servers.log)
    taken = net.take_grad(2)
    assert servers.since(mark) == ["TakeGradient 1", "ReduceGradients 0", "ReduceGradients 1", "ReduceGradients 2"]
    assert taken["w"].tolist() == [[1, 1], [1, 1], [2, 2], [2, 2], [0, 0], [0, 0]]
    assert list(taken) == ["w", "b", "t"]
    assert (taken.step, taken.num_gradients, taken.total_weight) == (8, 2, 2.0)


def test_what_a_server_has_lost_is_staged_there_once_more(servers: Servers, net: gradserve.GradientAccumulator) -> None:
    servers.errors["ReduceGradients 2"] = [LOST, LOST, LOST, LOST]
    mark = len(servers.log)
    net.push_pull(GRADIENT, 2, 7, worker_id="a")
    assert servers.since(mark)[4:] == [
        *("ReduceGradients 0", "ReduceGradients 1", "ReduceGradients 2"),
        *("StageGradient 2", "ReduceGradients 2"),
        *("pause 0.05", "ReduceGradients 2", "pause 0.1", "ReduceGradients 2", "pause 0.2", "ReduceGradients 2"),
    ]
    again = servers.requests[mark + 7]
    first = servers.requests[mark + 2]
    assert (first.can_stage_again, again.can_stage_again) == (True, False), "from now on it has to be held"
    again.can_stage_again = True
    assert again == first


@pytest.mark.parametrize(
    ("timeout", "pauses"),
    [
        (math.inf, ["0.05", "0.1", "0.2", "0.4", "0.8", "1", "1", "1", "0.45"]),
        (60.0, ["0.05", "0.1", "0.2", "0.4", "0.8", "1", "1", "1", "0.45"]),
        (0.5, ["0.05", "0.1", "0.2", "0.15"]),
        (0.0, []),
    ],
)
def test_patience_ends(servers: Servers, net: gradserve.GradientAccumulator, timeout: float, pauses: list[str]) -> None:
    servers.errors["ReduceGradients 0"] = [LOST] * 100
    mark = len(servers.log)
    with pytest.raises(AbortedError, match=r"^server 0 of the cluster has lost gradients of round 4 .*local_step=8 \["):
        net.take_grad(2, timeout=timeout)
    assert [line.split()[1] for line in servers.since(mark) if line.startswith("pause")] == pauses


@pytest.mark.parametrize("begin", ["stage", "reduce"])
def test_a_server_without_the_accumulator_gets_it_again(
    servers: Servers, net: gradserve.GradientAccumulator, begin: str
) -> None:
    """After the home has said that it is still there."""
    mark = len(servers.log)
    if begin == "stage":
        servers.errors["StageGradient 0"] = [NotFoundError("none")]
        net.apply_grad(GRADIENT, 7)
        expected = ["StageGradient 0", "GetNumAccumulated 1", "CreateAccumulator 0", "StageGradient 0"]
        assert servers.since(mark)[:4] == expected
    else:
        servers.errors["ReduceGradients 0"] = [NotFoundError("none"), LOST]
        net.take_grad(2)
        assert servers.since(mark)[1:8] == [
            *("ReduceGradients 0", "GetNumAccumulated 1", "CreateAccumulator 0", "pause 0.05"),
            *("ReduceGradients 0", "pause 0.1", "ReduceGradients 0"),
        ]


def test_what_was_deleted_is_not_made_again(servers: Servers, net: gradserve.GradientAccumulator) -> None:
    servers.errors = {
        "StageGradient 0": [NotFoundError("none")],
        "GetNumAccumulated 1": [NotFoundError("it was deleted")],
    }
    mark = len(servers.log)
    with pytest.raises(NotFoundError, match="it was deleted") as error:
        net.push_pull(GRADIENT, 2, 7)
    assert error.value.request_id is not None
    assert servers.since(mark) == ["StageGradient 0", "GetNumAccumulated 1"]


@pytest.mark.parametrize(
    "error", [AbortedError("deleted"), InvalidArgumentError("no", field=LOST_FIELD), UnavailableError("gone")]
)
def test_other_errors_are_the_callers(
    servers: Servers, net: gradserve.GradientAccumulator, error: GradserveError
) -> None:
    servers.errors["ReduceGradients 0"] = [error]
    with pytest.raises(type(error)) as raised:
        net.push_pull(GRADIENT, 2, 7)
    assert raised.value is error
    assert error.request_id is not None
    assert not any(line.startswith("pause") for line in servers.log)


def test_a_stale_gradient_is_not_staged_again(servers: Servers, net: gradserve.GradientAccumulator) -> None:
    servers.outcome = accumulator_pb2.APPLY_OUTCOME_STALE
    servers.errors["ReduceGradients 0"] = [LOST] * 100
    result = net.push_pull(GRADIENT, 2, 3, on_stale="return", timeout=0.1)
    assert (result.outcome, dict(result), result.gradients, result.global_step) == (gradserve.STALE, {}, None, 8)
    assert servers.log.count("StageGradient 0") == 1


def test_fields_name_the_place_in_the_whole_gradient(servers: Servers, net: gradserve.GradientAccumulator) -> None:
    names = [piece for piece in ("w", "b", "t") if 2 in dict(_pieces(servers.spec, piece))]
    for place, name in enumerate(names):
        servers.errors["StageGradient 2"] = [InvalidArgumentError("bad", field=f"gradient[{place}].dense.shape")]
        with pytest.raises(InvalidArgumentError) as error:
            net.apply_grad(GRADIENT, 7)
        assert error.value.field == f"gradient[{list(MODEL).index(name)}].dense.shape"
    servers.errors["StageGradient 2"] = [InvalidArgumentError("bad", field="local_step")]
    with pytest.raises(InvalidArgumentError) as error:
        net.apply_grad(GRADIENT, 7)
    assert error.value.field == "local_step"


def test_gradients_are_kept_without_their_arrays(servers: Servers, net: gradserve.GradientAccumulator) -> None:
    """They are on the disks of the servers, at this durability."""
    net.apply_grad(GRADIENT, 7)
    session: Any = net._calls._wire._session
    assert session.kept.oldest.arrays == ()
    assert not session.kept.oldest.request(()).gradient


def test_deletion_begins_at_the_home_and_attempts_all(servers: Servers, net: gradserve.GradientAccumulator) -> None:
    mark = len(servers.log)
    servers.errors["DeleteAccumulator 0"] = [UnavailableError("gone")]
    with pytest.raises(UnavailableError):
        net.delete()
    assert [each.home_incarnation for each in servers.requests[mark:]] == ["", "gone-1", "gone-1"]
    assert servers.since(mark) == ["DeleteAccumulator 1", "DeleteAccumulator 0", "DeleteAccumulator 2"]
    assert net.delete()


def test_information_is_the_homes_with_the_memory_of_all(servers: Servers, net: gradserve.GradientAccumulator) -> None:
    assert net.info().num_bytes == 111
    servers.errors["GetAccumulator 2"] = [NotFoundError("it was started again")]
    assert net.info().num_bytes == 11


@pytest.mark.parametrize(
    ("call", "method"),
    [
        (lambda net: net.num_accumulated(), "GetNumAccumulated 1"),
        (lambda net: net.set_global_step(9), "SetGlobalStep 1"),
    ],
)
def test_the_home_alone_is_asked(
    servers: Servers, net: gradserve.GradientAccumulator, call: Callable[[Any], Any], method: str
) -> None:
    mark = len(servers.log)
    call(net)
    assert servers.since(mark) == [method]


STAGED = ["StageGradient 0", "StageGradient 1", "StageGradient 2"]
FORGOTTEN = ["EndEpoch 1", "ForgetGradients 0", "ForgetGradients 1", "ForgetGradients 2"]


def test_a_gradient_is_staged_again_in_the_epoch_in_which_it_counts(
    servers: Servers, net: gradserve.GradientAccumulator
) -> None:
    servers.epoch = 5
    servers.errors["ApplyGradient 1"] = [AbortedError("another epoch", field="epoch")]
    mark = len(servers.log)
    net.apply_grad(GRADIENT, 7)
    assert servers.since(mark) == [*STAGED, "ApplyGradient 1", "GetNumAccumulated 1", *STAGED, "ApplyGradient 1"]
    sent = servers.requests[mark:]
    assert [each.epoch for each in (*sent[:4], *sent[5:])] == [3] * 4 + [5] * 4
    assert len({each.request_id.sequence for each in (*sent[:4], *sent[5:])}) == 1


@pytest.mark.parametrize(
    "outcome", [accumulator_pb2.APPLY_OUTCOME_STALE, accumulator_pb2.APPLY_OUTCOME_ALREADY_COUNTED]
)
def test_what_does_not_count_is_withdrawn_with_the_next_gradient(
    servers: Servers, net: gradserve.GradientAccumulator, outcome: Any
) -> None:
    servers.outcome = outcome
    net.apply_grad(GRADIENT, 7)
    servers.outcome = accumulator_pb2.APPLY_OUTCOME_ACCEPTED
    number = servers.requests[-1].request_id.sequence
    for withdrawn in ([number], []):
        mark = len(servers.log)
        net.apply_grad(GRADIENT, 7)
        assert [list(each.withdrawn) for each in servers.requests[mark : mark + 3]] == [withdrawn] * 3


def test_a_gradient_of_a_worker_that_waits_in_vain_is_withdrawn_if_another_one_counts(
    servers: Servers, client: gradserve.Client, net: gradserve.GradientAccumulator
) -> None:
    counted, other = (DeadlineExceededError("too few", field=field) for field in (None, "worker_id"))
    servers.errors["PushPull 1"] = [counted, other]
    for _ in range(2):
        with pytest.raises(DeadlineExceededError):
            net.push_pull(GRADIENT, 2, 7)
    number = servers.requests[-1].request_id.sequence
    again = client.gradient_accumulator(MODEL, NAME, sharded=True)
    mark = len(servers.log)
    again.push_pull(GRADIENT, 2, 7)
    assert [list(each.withdrawn) for each in servers.requests[mark : mark + 3]] == [[number]] * 3


def test_a_gradient_that_is_sent_again_is_not_withdrawn(servers: Servers, net: gradserve.GradientAccumulator) -> None:
    """It may count this time, if its home has lost the first answer."""
    servers.outcome = accumulator_pb2.APPLY_OUTCOME_STALE
    net.apply_grad(GRADIENT, 7)
    number = servers.requests[-1].request_id.sequence
    mark = len(servers.log)
    net.apply_grad(GRADIENT, 7, request_id=number)
    assert [list(each.withdrawn) for each in servers.requests[mark : mark + 3]] == [[]] * 3


def test_a_server_without_memory_forgets_what_does_not_count(
    servers: Servers, net: gradserve.GradientAccumulator
) -> None:
    servers.errors["StageGradient 2"] = [ResourceExhaustedError("full")]
    mark = len(servers.log)
    net.apply_grad(GRADIENT, 7)
    assert servers.since(mark) == [*STAGED, *FORGOTTEN, *STAGED, "ApplyGradient 1"]
    told = servers.requests[mark + 4]
    assert (told.home_incarnation, told.epoch, list(told.part_ids)) == ("home-1", 4, [b"1" * 16])
    assert {each.epoch for each in servers.requests[mark + 7 :]} == {4}
    servers.errors["StageGradient 2"] = [ResourceExhaustedError("full")] * 2
    with pytest.raises(ResourceExhaustedError):
        net.apply_grad(GRADIENT, 7)


def test_servers_that_ask_about_old_gradients_are_told(servers: Servers, net: gradserve.GradientAccumulator) -> None:
    servers.asking = {0, 2}
    mark = len(servers.log)
    net.apply_grad(GRADIENT, 7)
    assert servers.since(mark) == [*STAGED, "ApplyGradient 1", "EndEpoch 1", "ForgetGradients 0", "ForgetGradients 2"]
    servers.errors["EndEpoch 1"] = [UnavailableError("not now")] * 100
    assert net.apply_grad(GRADIENT, 7).outcome is gradserve.Outcome.ACCEPTED


def test_reads_have_numbers(servers: Servers, net: gradserve.GradientAccumulator) -> None:
    net.read_average()
    net.read_average()
    first, second = (each for each in servers.requests if isinstance(each, messages_pb2.ReadAverageRequest))
    assert first.request_id.client_id == second.request_id.client_id
    assert first.request_id.sequence < second.request_id.sequence
    assert not second.request_id.unanswered
