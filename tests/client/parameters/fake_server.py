"""A ParameterService in memory, and the two faces of the client in front of it.

It answers exchanges, not bytes on a network, and its optimizer is plain SGD on the mean: it is there for what the
client itself decides and sends.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

import gradserve
from gradserve.calls.client import ClientCalls
from gradserve.calls.exchange import Background, Exchange, Operation, Pause, TimeLimits, Unary
from gradserve.calls.identity import RequestIds
from gradserve.calls.retries import Attempt, Contact, RetryPolicy, with_retries
from gradserve.transport.driving import completed, drive
from gradserve_protocol.digest import digest_of
from gradserve_protocol.errors import AbortedError, InvalidArgumentError, NotFoundError, OutOfRangeError
from gradserve_protocol.tensors import encode_message, to_data_type, to_dtype
from gradserve_protocol.v1 import accumulator_pb2, lease_messages_pb2, parameters_pb2, server_messages_pb2, tensor_pb2
from gradserve_protocol.v1 import parameters_messages_pb2 as messages_pb2
from tests.client import fake_transport
from tests.servers.connecting import aio_client_over, client_over

T = TypeVar("T")
Array = NDArray[Any]


def array_of(tensor: tensor_pb2.Tensor) -> Array:
    return np.frombuffer(tensor.content, to_dtype(tensor.dtype)).reshape(tuple(tensor.shape)).copy()


def inline(array: Array) -> tensor_pb2.Tensor:
    return tensor_pb2.Tensor(dtype=to_data_type(array.dtype), shape=array.shape, content=array.tobytes())


def values_in(parts: Any) -> dict[str, Array]:
    return {part.name: array_of(part.dense) for part in parts}


@dataclass
class Held:
    """Parameters as the server holds them.

    Attributes:
        spec: Their properties.
        incarnation: Distinguishes them from others of the name.
        versions: The kept versions by step.
        updates: The updates of the open round, with their weights.
        state: The state of the optimizer that was given.
    """

    spec: parameters_pb2.ParametersSpec
    incarnation: str
    versions: dict[int, dict[str, Array]]
    updates: list[tuple[float, dict[str, Array]]] = field(default_factory=list)
    state: parameters_pb2.OptimizerState | None = None
    is_private: bool = False
    answers: dict[tuple[str, int], messages_pb2.PushResponse] = field(default_factory=dict)

    @property
    def step(self) -> int:
        return max(self.versions)

    def version(self, step: int, *, with_values: bool = True) -> parameters_pb2.Version:
        values = self.versions[step]
        version = parameters_pb2.Version(step=step, digest=digest_of(values.values()), num_updates=len(self.updates))
        if with_values:
            for name, value in values.items():
                version.components.add(name=name).dense.CopyFrom(inline(value))
        return version

    def end_round(self) -> None:
        """Applies SGD(lr) to the mean of the updates."""
        sign = 1 if self.spec.update == parameters_pb2.UPDATE_KIND_DELTA else -1
        now = {name: value.copy() for name, value in self.versions[self.step].items()}
        for name, value in now.items():
            given = [(weight, update[name]) for weight, update in self.updates if name in update]
            if given:
                mean = np.average([update for _, update in given], axis=0, weights=[weight for weight, _ in given])
                value += (sign * self.spec.optimizer.sgd.lr * mean).astype(value.dtype)
        self.versions[self.step + 1] = now
        for step in sorted(self.versions)[: -self.spec.keep_versions]:
            del self.versions[step]
        self.updates = []


@dataclass
class FakeParameterServer:
    """Remembers the requests, and answers them.

    Attributes:
        requests: All of them as they were on the wire, in their order, with the names of the methods.
        failures: What the next calls of a method end with.
        held: The parameters by name.
        run: The incarnation of the server.
        page: How many records ListRounds returns at once.
        num_rounds: How many records there are.
    """

    requests: list[tuple[str, Any]] = field(default_factory=list)
    failures: dict[str, list[BaseException]] = field(default_factory=dict)
    held: dict[str, Held] = field(default_factory=dict)
    run: str = "run-1"
    page: int = 2
    num_rounds: int = 0
    num_created: int = 0
    durability: accumulator_pb2.Durability = accumulator_pb2.DURABILITY_GRADIENT
    background: list[Any] = field(default_factory=list)

    def of(self, method: str) -> list[Any]:
        """Returns the requests of a method."""
        return [request for name, request in self.requests if name == method]

    def answer(self, exchange: Exchange) -> Any:
        if isinstance(exchange, Background):
            self.background.append(exchange)
            return None
        if isinstance(exchange, Pause):
            return None
        assert isinstance(exchange, Unary), exchange
        request: Any = exchange.request
        if not hasattr(request, "SerializeToString"):
            parsed = type(request.message)()
            parsed.ParseFromString(encode_message(request))
            request = parsed
        copied = type(request)()
        copied.CopyFrom(request)
        self.requests.append((exchange.method, copied))
        if self.failures.get(exchange.method):
            raise self.failures[exchange.method].pop(0)
        self._check_run(copied)
        return getattr(self, f"_{exchange.method}")(copied)

    def restart(self, *, keeps: bool = True) -> None:
        """Starts the server again; without its state directory if it keeps nothing. Updates of open rounds are lost."""
        self.run = f"run-{int(self.run[4:]) + 1}"
        if not keeps:
            self.held.clear()
        for each in self.held.values():
            each.updates = []
            each.answers.clear()

    def _check_run(self, request: Any) -> None:
        if hasattr(request, "parameters") and hasattr(request.parameters, "server_incarnation"):
            run = request.parameters.server_incarnation
            if run and run != self.run:
                raise AbortedError("of an earlier run", field="parameters.server_incarnation")

    def _find(self, ref: parameters_pb2.ParametersRef) -> Held:
        held = self.held.get(ref.name)
        if held is None or ref.incarnation not in ("", held.incarnation):
            raise NotFoundError(f"there are no parameters {ref.name!r}", field="parameters.name")
        return held

    def _info(self, ref: parameters_pb2.ParametersRef) -> parameters_pb2.ParametersInfo:
        held = self._find(ref)
        info = parameters_pb2.ParametersInfo(
            spec=held.spec,
            step=held.step,
            digest=digest_of(held.versions[held.step].values()),
            num_updates=len(held.updates),
            kept_steps=sorted(held.versions),
            server_incarnation=self.run,
            is_private=held.is_private,
        )
        info.parameters.container = ref.container or "default"
        info.parameters.name = ref.name
        info.parameters.incarnation = held.incarnation
        return info

    def _CreateParameters(self, request: messages_pb2.CreateParametersRequest) -> Any:  # noqa: N802
        created = request.parameters.name not in self.held
        if created:
            if not request.values:
                self._find(request.parameters)
            self.num_created += 1
            spec = parameters_pb2.ParametersSpec()
            spec.CopyFrom(request.spec)
            spec.durability = spec.durability or self.durability
            self.held[request.parameters.name] = Held(
                spec,
                f"incarnation-{self.num_created}",
                {request.step: values_in(request.values)},
                state=request.state if request.HasField("state") else None,
            )
        return messages_pb2.CreateParametersResponse(info=self._info(request.parameters), created=created)

    def _GetParameters(self, request: messages_pb2.GetParametersRequest) -> Any:  # noqa: N802
        return messages_pb2.GetParametersResponse(info=self._info(request.parameters))

    def _ListParameters(self, request: messages_pb2.ListParametersRequest) -> Any:  # noqa: N802
        names = sorted(self.held)
        first = int(request.page_token or 0)
        infos = [self._info(parameters_pb2.ParametersRef(name=name)) for name in names[first : first + 1]]
        more = str(first + 1) if first + 1 < len(names) else ""
        return messages_pb2.ListParametersResponse(parameters=infos, next_page_token=more)

    def _DeleteParameters(self, request: messages_pb2.DeleteParametersRequest) -> Any:  # noqa: N802
        return messages_pb2.DeleteParametersResponse(deleted=self.held.pop(request.parameters.name, None) is not None)

    def _ReadParameters(self, request: messages_pb2.ReadParametersRequest) -> Any:  # noqa: N802
        held = self._find(request.parameters)
        step = request.step if request.HasField("step") else held.step
        if step not in held.versions:
            raise OutOfRangeError(f"step {step} is not kept", field="step")
        version = held.version(step, with_values=not request.without_values)
        if request.with_state:
            state = held.state or parameters_pb2.OptimizerState(
                rounds=held.step, component_steps=[held.step] * len(held.spec.components), optimizer=held.spec.optimizer
            )
            version.state.CopyFrom(state)
        return messages_pb2.ReadParametersResponse(version=version)

    def _add(self, request: Any) -> messages_pb2.PushResponse:
        held = self._find(request.parameters)
        if request.local_step > held.step:
            raise InvalidArgumentError("local_step is in the future", field="local_step")
        call = (request.request_id.client_id, request.request_id.sequence)
        if call in held.answers:
            answer = held.answers[call]
            answer.duplicate = True
            return answer
        staleness = held.step - request.local_step
        answer = messages_pb2.PushResponse(staleness=staleness, step=held.step, num_rounds=held.step + 10)
        if staleness > held.spec.staleness.max and not getattr(request, "accepted_before", False):
            answer.outcome = accumulator_pb2.APPLY_OUTCOME_STALE
            return answer
        weight = request.weight if request.HasField("weight") else 1.0
        held.updates.append((weight, values_in(request.update)))
        answer.round = held.step + 11  # rounds and steps need not be the same
        if len(held.updates) >= held.spec.rounds.num_required:
            held.end_round()
        answer.outcome = accumulator_pb2.APPLY_OUTCOME_ACCEPTED
        answer.step, answer.num_rounds = held.step, held.step + 10
        answer.num_updates, answer.weight = len(held.updates), weight
        held.answers[call] = answer
        return answer

    def _Push(self, request: messages_pb2.PushRequest) -> Any:  # noqa: N802
        return self._add(request)

    def _PushPullParameters(self, request: messages_pb2.PushPullParametersRequest) -> Any:  # noqa: N802
        answer = self._add(request)
        held = self._find(request.parameters)
        return messages_pb2.PushPullParametersResponse(
            outcome=answer.outcome,
            duplicate=answer.duplicate,
            version=held.version(held.step),
            staleness=answer.staleness,
            weight=answer.weight,
        )

    def _ChangeParameters(self, request: messages_pb2.ChangeParametersRequest) -> Any:  # noqa: N802
        held = self._find(request.parameters)
        for name in ("optimizer", "schedule", "rounds"):
            if request.HasField(name):
                getattr(held.spec, name).CopyFrom(getattr(request, name))
        if request.values:
            held.versions[max(request.step, held.step + 1)] = values_in(request.values)
            held.state = request.state if request.HasField("state") else None
            held.updates = []
        return messages_pb2.ChangeParametersResponse(info=self._info(request.parameters))

    def _ListRounds(self, request: messages_pb2.ListRoundsRequest) -> Any:  # noqa: N802
        steps = range(request.since + 1, self.num_rounds + 1)
        records = [parameters_pb2.RoundRecord(step=step, reason="required") for step in steps[: self.page]]
        for each in records:
            each.updates.add(worker_id="w", weight=2.0, norm=0.5)
            each.end_time.FromSeconds(each.step)
        return messages_pb2.ListRoundsResponse(rounds=records, has_more=len(steps) > self.page)

    def _ForkParameters(self, request: messages_pb2.ForkParametersRequest) -> Any:  # noqa: N802
        held = self._find(request.parameters)
        step = request.step if request.HasField("step") else held.step
        self.num_created += 1
        self.held[request.fork.name] = Held(
            held.spec, f"incarnation-{self.num_created}", {step: dict(held.versions[step])}
        )
        return messages_pb2.ForkParametersResponse(info=self._info(request.fork))

    def _HoldClientLease(self, _request: Any) -> Any:  # noqa: N802
        return lease_messages_pb2.HoldClientLeaseResponse()

    def _EndClientLease(self, _request: Any) -> Any:  # noqa: N802
        return lease_messages_pb2.EndClientLeaseResponse()

    def _GetServerInfo(self, _request: Any) -> Any:  # noqa: N802
        return server_messages_pb2.GetServerInfoResponse()


class RetryingTransport(fake_transport.FakeTransport):
    """Repeats calls as the network's transport does, so that calls for an earlier run are made for the present one."""

    def run(self, operation: Operation[T], /) -> T:
        steps = with_retries(operation, TimeLimits(), RetryPolicy(pauses=()), time.monotonic, Contact())
        return completed(drive(steps, partial(self._attempt, self._answer)))

    @staticmethod
    async def _attempt(answer: Any, step: Any) -> Any:
        exchange: Any = step.exchange if isinstance(step, Attempt) else step
        return await fake_transport.perform(answer, exchange)


def calls(client_id: str = "me") -> ClientCalls:
    return ClientCalls(RequestIds(client_id), TimeLimits())


@contextmanager
def client_of(server: FakeParameterServer, client_id: str = "me") -> Iterator[gradserve.Client]:
    """Yields a blocking client of a server."""
    with client_over(RetryingTransport(server.answer), "nowhere:1", calls(client_id)) as client:
        yield client


def aio_client_of(server: FakeParameterServer) -> Any:
    return aio_client_over(fake_transport.FakeAsyncTransport(server.answer), "nowhere:1", calls())
