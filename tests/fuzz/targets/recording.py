"""Recorded calls: valid requests of every method, in the order in which they were made.

python -m tests.fuzz.targets.recording    records them again
"""

import asyncio
import contextlib
import itertools
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message

import gradserve
from gradserve import optim
from gradserve_protocol.v1 import accumulator_messages_pb2 as messages_pb2
from gradserve_protocol.v1 import accumulator_pb2, parameters_messages_pb2
from gradserve_server.config import LimitsConfig, RuntimeConfig, ServerConfig
from gradserve_server.config.servers import ClusterConfig
from gradserve_server.parts import Parts
from gradserve_server.rpc.boundary.chain import Call, Handle, Interceptor
from gradserve_testing import LocalServer
from tests.bad_input.requests import Apply, PushPull, identity, zeros
from tests.bad_input.requests import Create as CreateAccumulator
from tests.bad_input.requests import component as component_spec
from tests.bad_input.requests import dense as dense_gradient
from tests.bad_input.requests import ref as accumulator_ref
from tests.bad_input.requests import spec as accumulator_spec
from tests.cluster.servers import name_at
from tests.cluster.sharding.clients import MODEL, gradient, small_pieces
from tests.rpc.parameters.requests import (
    MOMENTUM,
    STATE,
    Change,
    Delete,
    Evaluations,
    Fork,
    Get,
    List,
    Read,
    Report,
    Rounds,
    create,
    push,
    push_pull,
    ref,
    spec,
    values,
)
from tests.servers.polling import PATIENCE_SECONDS
from tests.servers.raw_calls import METHODS, RawCalls

MAX_BYTES = 64 << 20
_CORPUS = Path(__file__).parents[1] / "corpus"
_MOST_REQUEST_BYTES = 10_000
_SIZE = 2
"""The number of servers of the cluster."""
_DIGEST = b"digest"


def _summands(sequence: int) -> list[accumulator_pb2.Summand]:
    """Returns what an aggregator says of the workers in a sum."""
    return [
        accumulator_pb2.Summand(
            worker_id=worker, weight=weight, request_id=identity(sequence, worker), parameters_digest=_DIGEST
        )
        for worker, weight in ((f"c{sequence}", 1.0), (f"d{sequence}", 2.0))
    ]


_SUM = [dense_gradient(zeros(2, 3))]
RAW_CALLS: list[tuple[str, Message]] = [
    ("CreateParameters", create(spec=spec(optimizer=MOMENTUM), state=STATE, step=3)),
    ("GetParameters", Get(parameters=ref())),
    ("ListParameters", List()),
    ("Push", push(sequence=1, local_step=3, worker_id="a", weight=2.0)),
    ("Push", push(sequence=2, local_step=4, sum_of=_summands(1))),
    ("PushPullParameters", push_pull(local_step=5, worker_id="b")),
    ("PushPullParameters", push_pull(request_id=identity(3), local_step=6, sum_of=_summands(2), without_values=True)),
    ("ReadParameters", Read(parameters=ref(), with_state=True)),
    ("ReadParameters", Read(parameters=ref(), without_values=True, request_id=identity(4))),
    ("Push", push(sequence=7, local_step=7, metrics={"loss": 0.5, "accuracy": float("nan")})),
    ("ListRounds", Rounds(parameters=ref(), since=3)),
    (
        "ReportEvaluation",
        Report(parameters=ref(), request_id=identity(8), step=3, metrics={"loss": 1.0}, worker_id="a"),
    ),
    ("ListEvaluations", Evaluations(parameters=ref(), since=2)),
    ("ChangeParameters", Change(parameters=ref(), optimizer=MOMENTUM, values=values(1.0), state=STATE)),
    ("ForkParameters", Fork(parameters=ref(), fork=ref("other fork"))),
    ("DeleteParameters", Delete(parameters=ref())),
    (
        "CreateAccumulator",
        CreateAccumulator(accumulator=accumulator_ref("sum"), spec=accumulator_spec(component_spec(dims=[2, 3]))),
    ),
    (
        "ApplyGradient",
        Apply(
            accumulator=accumulator_ref("sum"),
            request_id=identity(5),
            gradient=_SUM,
            worker_id="a",
            parameters_digest=_DIGEST,
        ),
    ),
    (
        "ApplyGradient",
        Apply(accumulator=accumulator_ref("sum"), request_id=identity(6), gradient=_SUM, sum_of=_summands(1)),
    ),
    (
        "PushPull",
        PushPull(
            accumulator=accumulator_ref("sum"),
            request_id=identity(7),
            gradient=_SUM,
            sum_of=_summands(2),
            num_required=1,
        ),
    ),
    (
        "PushPull",
        PushPull(
            accumulator=accumulator_ref("sum"), gradient=_SUM, num_required=1, worker_id="b", parameters_digest=_DIGEST
        ),
    ),
]
"""Calls of every method of ParameterService, and what aggregators alone send."""


def new_ids() -> Callable[[], str]:
    """Returns ids that are the same in each run, so that recorded handles are those of the server that they go to."""
    count = itertools.count(1)
    return lambda: f"{next(count):032x}"


@dataclass(frozen=True)
class Recording:
    """Requests of one server.

    Attributes:
        name: The name of the folder with the requests.
        cluster: The place of the server in a cluster.
    """

    name: str
    cluster: ClusterConfig = field(default_factory=ClusterConfig)

    @property
    def folder(self) -> Path:
        return _CORPUS / self.name

    def server(self, *interceptors: Interceptor) -> LocalServer:
        """Returns a server for the requests."""
        config = ServerConfig(
            limits=LimitsConfig.model_validate(
                {"max_bytes": MAX_BYTES, "max_region_bytes": MAX_BYTES, "max_handles": 10_000}
            ),
            runtime=RuntimeConfig(warm_up=False, stream_idle_seconds=2.0),
            cluster=self.cluster,
        )
        parts = Parts(new_id=new_ids(), wall_clock=lambda: 1, new_seed=lambda: 1, interceptors=interceptors)
        return LocalServer(config, parts)

    def calls(self) -> list[tuple[str, bytes]]:
        """Returns the methods and requests."""
        return [(path.name.partition("-")[2], path.read_bytes()) for path in sorted(self.folder.iterdir())]

    def write(self, calls: list[tuple[str, bytes]]) -> None:
        """Writes methods and requests in place of those before."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for old in self.folder.iterdir():
            old.unlink()
        for number, (method, request) in enumerate(calls):
            (self.folder / f"{number:03}-{method}").write_bytes(request)


ALONE = Recording("calls")
SHARDED = Recording("shards", ClusterConfig(cluster="fuzz", cluster_size=_SIZE, cluster_index=0))
"""One of two servers: it is the home of some accumulators and parameters, and has shards of others."""


def kind_of(method: str) -> type[Message]:
    """Returns the class of a method's requests."""
    kind: type[Message] = METHODS[method].input_type._concrete_class
    return kind


class Recorder:
    """An interceptor that keeps the requests of all calls."""

    def __init__(self) -> None:
        self._calls: list[tuple[str, Message]] = []

    def around(self, method: MethodDescriptor, handle: Handle) -> Handle:
        async def recording(request: Any, call: Call) -> Any:
            if method.client_streaming:
                return await handle(self._streamed(method.name, request), call)
            self._keep(method.name, request)
            return await handle(request, call)

        return recording

    async def _streamed(self, method: str, requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
        async for request in requests:
            if isinstance(request, Message):
                self._keep(method, request)
            yield request

    def _keep(self, method: str, request: Message) -> None:
        self._calls.append((method, kind_of(method).FromString(request.SerializeToString())))

    def all(self) -> list[tuple[str, bytes]]:
        """Returns all requests."""
        return [(method, request.SerializeToString()) for method, request in self._calls]

    def representative(self) -> list[tuple[str, bytes]]:
        """Returns the first three requests of each method, all that create something, and all with a new field."""
        counts: dict[str, int] = {}
        seen: dict[str, set[str]] = {}
        kept = []
        for method, request in self._calls:
            data = request.SerializeToString()
            fields = set(_fields(request)) - seen.setdefault(method, set())
            if len(data) < _MOST_REQUEST_BYTES and (fields or counts.get(method, 0) < 3 or method.startswith("Create")):
                kept.append((method, data))
                counts[method] = counts.get(method, 0) + 1
                seen[method] |= fields
        return kept


def _fields(message: Message, path: str = "") -> Iterator[str]:
    """Yields the paths of all fields that are set."""
    for each, value in message.ListFields():
        name = f"{path}.{each.name}"
        yield name
        if each.message_type is not None and not each.message_type.GetOptions().map_entry:
            for inner in value if each.is_repeated else (value,):
                yield from _fields(inner, name)


async def _alone() -> list[tuple[str, bytes]]:
    """Makes a good call of every method of a server without a cluster."""
    from tests.arguments.calls import REQUIRED, make_things
    from tests.client.every_call import CALLS
    from tests.client.every_call import make_things as make_others

    recorder = Recorder()
    with (
        ALONE.server(recorder) as local,
        gradserve.connect(local.address, transport="grpc", timeout=PATIENCE_SECONDS) as client,
    ):
        others = make_others(client)
        for name, call in CALLS.items():
            # There is no folder to save parameters in.
            with contextlib.suppress(gradserve.GradserveError, gradserve.StaleGradientError, FileNotFoundError):
                if "delete" not in name:
                    call(client, others)
        things = await make_things(client)
        for name in REQUIRED:
            if name.startswith("raw_ops.") and not name.endswith("Accumulator"):
                with contextlib.suppress(gradserve.GradserveError):
                    things.method(name)(**things.arguments(name))
        for name in ("delete accumulator", "layer delete", "delete", "delete_accumulator", "delete_batch_norm_layer"):
            with contextlib.suppress(gradserve.GradserveError):
                CALLS[name](client, others)
    with (
        ALONE.server(recorder) as local,
        gradserve.connect(local.address, transport="bulk", timeout=PATIENCE_SECONDS) as client,
    ):
        client.get(client.put([1.0, 2.0]))
    with ALONE.server(recorder) as local, RawCalls(local.address) as raw:
        for name, message in RAW_CALLS:
            raw.call(name, message)
    return recorder.representative()


def _sharded() -> list[tuple[str, bytes]]:
    """Shards accumulators and parameters over two servers; returns what the first was sent."""
    recorder = Recorder()
    other = Recording("", ClusterConfig(cluster="fuzz", cluster_size=_SIZE, cluster_index=1))
    with (
        small_pieces(),
        SHARDED.server(recorder) as first,
        other.server() as second,
        gradserve.connect([first.address, second.address], transport="grpc", timeout=PATIENCE_SECONDS) as client,
        RawCalls(first.address) as raw,
    ):
        for home in range(_SIZE):
            _use_accumulator(client, raw, home)
            _use_parameters(client, raw, home)
    return recorder.all()


def _use_accumulator(client: gradserve.Client, raw: RawCalls, home: int) -> None:
    name = name_at(home, _SIZE)
    model = client.gradient_accumulator(MODEL, name, keep_averages=2, sharded=True)
    model.apply_grad(gradient(1), 0, worker_id="a")
    model.push_pull(gradient(3), 2, 0, worker_id="b", weight=2.0)
    model.apply_grad(gradient(5), 1)
    model.take_grad(1)
    model.read_average(2)
    model.set_global_step(7)
    client.list_accumulators()
    epoch, incarnation = (
        0,
        raw.call(
            "GetAccumulator", messages_pb2.GetAccumulatorRequest(accumulator=accumulator_ref(name))
        ).info.accumulator.incarnation,
    )
    if home == 0:
        epoch = raw.call("EndEpoch", messages_pb2.EndEpochRequest(accumulator=accumulator_ref(name))).epoch
    forgotten = messages_pb2.ForgetGradientsRequest(
        accumulator=accumulator_ref(name), home_incarnation=incarnation, epoch=epoch, part_ids=[bytes(16)]
    )
    raw.call("ForgetGradients", forgotten)
    model.delete()
    client.gradient_accumulator(MODEL, name, sharded=True)


def _use_parameters(client: gradserve.Client, raw: RawCalls, home: int) -> None:
    values = {"kernel": np.ones((7, 3), np.float32), "bias": np.ones(3), "scale": np.ones((5, 2), np.float16)}
    name = name_at(home, _SIZE)
    parameters = client.parameters(values, name, sharded=True, optimizer=optim.SGD(0.1, momentum=0.9), num_required=2)
    for step in range(2):
        parameters.push(values, step, worker_id="a", weight=2.0)
        parameters.push_pull(values, step, worker_id="b")
    parameters.read()
    parameters.change(num_required=1)
    with tempfile.TemporaryDirectory() as folder:
        parameters.save(Path(folder) / "saved")
        parameters.load(Path(folder) / "saved")
    parameters.rounds()
    client.list_parameters()
    found = ref(name, incarnation=parameters.info().incarnation)
    raw.call("GetParameters", Get(parameters=found))
    epoch = 0
    if home == 0:
        epoch = raw.call("CountUpdates", parameters_messages_pb2.CountUpdatesRequest(parameters=found)).epoch
    forgotten = parameters_messages_pb2.ForgetUpdatesRequest(parameters=found, epoch=epoch, part_ids=[bytes(16)])
    raw.call("ForgetUpdates", forgotten)


def record() -> dict[Recording, list[tuple[str, bytes]]]:
    """Returns the requests of every recording, made anew.

    Raises:
        AssertionError: A method was not called.
    """
    found = {ALONE: asyncio.run(_alone()), SHARDED: _sharded()}
    missing = METHODS.keys() - {method for calls in found.values() for method, _ in calls}
    assert not missing, missing
    return found


if __name__ == "__main__":
    for recording, requests in record().items():
        recording.write(requests)
