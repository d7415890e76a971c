"""Recorded calls: one valid request or more of every method, in the order in which they were made."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message

import gradserve
from gradserve_server.config import LimitsConfig, RuntimeConfig, ServerConfig
from gradserve_server.parts import Parts
from gradserve_server.rpc.boundary.chain import Call, Handle, Interceptor
from gradserve_testing import LocalServer
from tests.rpc.parameters.requests import (
    MOMENTUM,
    STATE,
    Change,
    Delete,
    Fork,
    Get,
    List,
    Read,
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

FOLDER = Path(__file__).parents[1] / "corpus" / "calls"
MAX_BYTES = 64 << 20
PARAMETER_CALLS: list[tuple[str, Message]] = [
    ("CreateParameters", create(spec=spec(optimizer=MOMENTUM), state=STATE, step=3)),
    ("GetParameters", Get(parameters=ref())),
    ("ListParameters", List()),
    ("Push", push(sequence=1, local_step=3, worker_id="a", weight=2.0)),
    ("PushPullParameters", push_pull(local_step=4, worker_id="b")),
    ("ReadParameters", Read(parameters=ref(), with_state=True)),
    ("ListRounds", Rounds(parameters=ref(), since=3)),
    ("ChangeParameters", Change(parameters=ref(), optimizer=MOMENTUM, values=values(1.0), state=STATE)),
    ("ForkParameters", Fork(parameters=ref(), fork=ref("fork"))),
    ("DeleteParameters", Delete(parameters=ref())),
]
"""Calls of every method of ParameterService."""


def new_ids() -> Callable[[], str]:
    """Returns ids that are the same in each run, so that recorded handles are those of the server that they go to."""
    count = itertools.count(1)
    return lambda: f"{next(count):032x}"


def server(*interceptors: Interceptor) -> LocalServer:
    """Returns a server for recorded requests."""
    config = ServerConfig(
        limits=LimitsConfig.model_validate(
            {"max_bytes": MAX_BYTES, "max_region_bytes": MAX_BYTES, "max_handles": 10_000}
        ),
        runtime=RuntimeConfig(warm_up=False, stream_idle_seconds=2.0),
    )
    return LocalServer(config, Parts(new_id=new_ids(), new_seed=lambda: 1, interceptors=interceptors))


def recorded() -> list[tuple[str, bytes]]:
    """Returns the methods and requests of the recording."""
    return [(path.name.partition("-")[2], path.read_bytes()) for path in sorted(FOLDER.iterdir())]


def kind_of(method: str) -> type[Message]:
    """Returns the class of a method's requests."""
    kind: type[Message] = METHODS[method].input_type._concrete_class
    return kind


class Recorder:
    """An interceptor that keeps the requests of all calls.

    Attributes:
        calls: Methods and requests.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, bytes]] = []

    def around(self, method: MethodDescriptor, handle: Handle) -> Handle:
        async def recording(request: Any, call: Call) -> Any:
            if method.client_streaming:
                return await handle(self._streamed(method.name, request), call)
            self.calls.append((method.name, request.SerializeToString()))
            return await handle(request, call)

        return recording

    async def _streamed(self, method: str, requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
        async for request in requests:
            if isinstance(request, Message):
                self.calls.append((method, request.SerializeToString()))
            yield request


def write(calls: list[tuple[str, bytes]]) -> None:
    """Writes a recording: the first three calls of each method."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for old in FOLDER.iterdir():
        old.unlink()
    for number, (method, request) in enumerate(calls):
        (FOLDER / f"{number:03}-{method}").write_bytes(request)
    missing = METHODS.keys() - {method for method, _ in calls}
    assert not missing, missing


async def record() -> list[tuple[str, bytes]]:
    """Makes a good call of every method over gRPC; returns what was sent."""
    from tests.arguments.calls import REQUIRED, make_things
    from tests.client.every_call import CALLS
    from tests.client.every_call import make_things as make_others

    recorder = Recorder()
    with (
        server(recorder) as local,
        gradserve.connect(local.address, transport="grpc", timeout=PATIENCE_SECONDS) as client,
    ):
        others = make_others(client)
        stale = gradserve.StaleGradientError
        for name, call in CALLS.items():
            try:
                if "delete" not in name:
                    call(client, others)
            except (gradserve.GradserveError, stale):
                pass
        things = await make_things(client)
        for name in REQUIRED:
            if name.startswith("raw_ops.") and not name.endswith("Accumulator"):
                with contextlib.suppress(gradserve.GradserveError):
                    things.method(name)(**things.arguments(name))
        for name in ("delete accumulator", "layer delete", "delete", "delete_accumulator", "delete_batch_norm_layer"):
            with contextlib.suppress(gradserve.GradserveError):
                CALLS[name](client, others)
    with (
        server(recorder) as local,
        gradserve.connect(local.address, transport="bulk", timeout=PATIENCE_SECONDS) as client,
    ):
        client.get(client.put([1.0, 2.0]))
    with server(recorder) as local, RawCalls(local.address) as raw:
        for name, message in PARAMETER_CALLS:
            raw.call(name, message)
    seen: dict[str, int] = {}
    kept = []
    for method, request in recorder.calls:
        seen[method] = seen.get(method, 0) + 1
        if seen[method] <= 3 and len(request) < 10_000:
            kept.append((method, request))
    return kept


if __name__ == "__main__":
    write(asyncio.run(record()))
