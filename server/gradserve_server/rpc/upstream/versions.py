"""Versions of parameters upstream, each fetched once for all readers here, and the saved versions that go there."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

from gradserve.calls.exchange import Operation, Reply, Unary, Whole
from gradserve.calls.tensors import delete_quietly, put, receive_results
from gradserve_protocol.errors import GradserveError
from gradserve_protocol.v1 import accumulator_pb2, parameters_pb2, tensor_pb2
from gradserve_protocol.v1 import parameters_messages_pb2 as messages_pb2
from gradserve_server.accumulators.gradient import Array
from gradserve_server.accumulators.rounds import Outcome
from gradserve_server.errors import OutOfRangeError
from gradserve_server.parameters.spec import ParametersSpec
from gradserve_server.parameters.variables import OptimizerState
from gradserve_server.parameters.versions import PackedVersions, Version
from gradserve_server.rpc.parameters.rules import decode_optimizer, decode_rules
from gradserve_server.rpc.upstream.aggregated import Aggregated, GradientLeaf, SendStaged
from gradserve_server.rpc.upstream.messages import (
    Answer,
    Pulled,
    copied,
    method_of,
    ref_of,
    service_of,
    version_of,
    waiting_request,
)
from gradserve_server.rpc.upstream.parameter_shards import UpstreamParameterShards
from gradserve_server.security.identity import ANONYMOUS
from gradserve_server.upstream.batches import Batches, Counts
from gradserve_server.upstream.latest import LatestAverage

if TYPE_CHECKING:
    from gradserve_server.rpc.upstream.link import UpstreamLink

_READ = "ReadParameters"
WithVersion = TypeVar("WithVersion", messages_pb2.CreateParametersRequest, messages_pb2.ChangeParametersRequest)


class AggregatedParameters(Aggregated):
    """Parameters upstream, and the updates on their way there.

    Attributes:
        properties: Their properties. The rules are those of the latest description.
        packed: Their versions as they are read here with a codec.
        servers: What each server upstream has of them; None if they are on one of them as a whole.
    """

    def __init__(
        self,
        ref: parameters_pb2.ParametersRef,
        spec: ParametersSpec,
        new_batches: Callable[[Aggregated], Batches[GradientLeaf]],
        latest: LatestAverage,
        link: UpstreamLink,
        counts: Counts,
        packed: PackedVersions,
        servers: UpstreamParameterShards | None,
        *,
        is_shared: bool,
    ) -> None:
        """Takes, among others, whether several workers here wait for the same versions."""
        super().__init__(ref, spec.updates, new_batches, latest)
        self.properties = spec
        self.packed = packed
        self.servers = servers
        self._rules = parameters_pb2.RoundRules()
        self._link = link
        self._counts = counts
        self._is_shared = is_shared

    @property
    def send_staged(self) -> SendStaged | None:
        """Sends an update to several servers; None if they are on one."""
        return None if self.servers is None else self.servers.send

    @property
    def adds_up(self) -> bool:
        """True if updates may go together; not those that make a version each."""
        return self.properties.adds_up and self.properties.rules.rounds.num_required > 1

    def follow(self, info: parameters_pb2.ParametersInfo) -> None:
        """Takes the rules of a description."""
        if info.spec.rounds != self._rules:
            self._rules = info.spec.rounds
            rounds = decode_rules(info.spec.rounds, "spec.rounds")
            self.properties = self.properties.with_rules(replace(self.properties.rules, rounds=rounds))

    def end(self) -> list[GradientLeaf]:
        """Notes that they are gone; see `Aggregated.end`."""
        self.packed.close()
        return super().end()

    # Versions

    async def version(self, ref: parameters_pb2.ParametersRef, head: Version) -> Version:
        """Returns a version of which the step is known, and the digest unless it is sharded.

        Raises:
            OutOfRangeError: It is no longer kept.
            ServiceError: See `UpstreamLink.call`.
        """
        kept = self.latest.find(head.step, head.round_number + 1, 0)
        if isinstance(kept, Version) and head.digest in (b"", kept.digest):
            return kept
        return await self.wait_for(ref, head.step, None)

    async def wait_for(
        self, ref: parameters_pb2.ParametersRef, step: int, timeout: float | None, *, with_values: bool = True
    ) -> Version:
        """Waits for the version of a step, once for all who do so at the same time.

        Args:
            ref: The parameters, as the caller names them.
            step: The step.
            timeout: Seconds to wait; None for no limit.
            with_values: Whether its components are wanted.

        Raises:
            TimeoutError: It did not come in time.
            OutOfRangeError: It is no longer kept.
            ServiceError: See `UpstreamLink.call`.
        """

        async def read() -> Version:
            if with_values:
                self._counts.downloads += 1
            return await self.read(ref, step, None, math.inf, with_values=with_values)

        key = (ref.server_incarnation, step, with_values)
        return cast(Version, await self.latest.shared(key, read, timeout, keep=with_values))

    async def read(
        self,
        ref: parameters_pb2.ParametersRef,
        step: int | None,
        timeout: float | None,
        wait: float,
        *,
        with_values: bool,
    ) -> Version:
        """Reads a version upstream; the newest for None.

        Args:
            ref: The parameters, as the caller names them.
            step: The step.
            timeout: Seconds that the server upstream may wait for it; None for no limit.
            wait: The same for the transport; math.inf for no limit.
            with_values: Whether its components are wanted.

        Raises:
            ServiceError: See `UpstreamLink.call`.
        """
        request = messages_pb2.ReadParametersRequest(parameters=ref, step=step, without_values=not with_values)
        waiting = waiting_request(request, ANONYMOUS, timeout)
        if self.servers is not None:
            return await self.servers.read(waiting, wait)
        return cast(Version, (await self._link.wait(_READ, waiting, wait))[1])

    async def read_state(
        self, ref: parameters_pb2.ParametersRef, *, with_values: bool
    ) -> tuple[Version, OptimizerState]:
        """Reads the newest version with the state of its optimizer, which is for one caller.

        Raises:
            ServiceError: See `UpstreamLink.call`.
        """
        if self.servers is not None:
            version, state = await self.servers.read_state(ref)
            return (version if with_values else replace(version, values={})), state
        request = waiting_request(
            messages_pb2.ReadParametersRequest(parameters=ref, with_state=True, without_values=not with_values),
            ANONYMOUS,
            None,
        )

        def reading() -> Operation[tuple[parameters_pb2.Version, list[Array]]]:
            reply: Reply = yield Whole(Unary(service_of(_READ), _READ, request, in_place=True))
            version: parameters_pb2.Version = reply.message.version
            tensors = [each.dense for each in version.components] + [each.value for each in version.state.slots]
            return version, (yield from receive_results(reply, tensors))

        message, arrays = await self._link.run_at_home(request.parameters, reading())
        names = [each.name for each in message.components]
        slots: dict[str, dict[str, Array]] = {}
        for slot, array in zip(message.state.slots, arrays[len(names) :], strict=True):
            slots.setdefault(slot.name, {})[slot.component] = array
        steps = dict(zip(self.properties.by_name, message.state.component_steps, strict=True))
        optimizer = decode_optimizer(message.state.optimizer)
        state = OptimizerState(slots, steps, message.state.rounds, optimizer)
        return version_of(message, dict(zip(names, arrays, strict=False))), state

    # Answers

    def leaves_values(self, leaf: GradientLeaf) -> bool:
        """Returns True if the version of a call that goes alone is to be fetched once for all workers here."""
        is_pull = isinstance(leaf.request, messages_pb2.PushPullParametersRequest)
        ends_alone = self.properties.rules.rounds.num_required == 1
        return is_pull and self._is_shared and not ends_alone and leaf.request.HasField("request_id")

    def share(self, leaf: GradientLeaf, answer: Answer) -> Answer:
        """Returns the answer to one call of a sum: with the weight of its own update."""
        weight = 0.0
        if isinstance(answer, Pulled):
            if answer.outcome is not Outcome.STALE:
                weight = self._weight_of(leaf, answer.staleness)
            return replace(answer, weight=weight)
        assert isinstance(answer, messages_pb2.PushResponse), "the update is one of parameters"
        if answer.outcome != accumulator_pb2.APPLY_OUTCOME_STALE:
            weight = self._weight_of(leaf, answer.staleness)
        own = copied(answer)
        own.weight = weight
        return own

    def _weight_of(self, leaf: GradientLeaf, staleness: int) -> float:
        rule = self.properties.staleness
        return leaf.contribution.discounted(rule.factor(min(staleness, rule.max))).weight

    async def complete(self, leaf: GradientLeaf, answer: Answer, again: Callable[[], Awaitable[Answer]]) -> Answer:
        """Returns an answer with the values that it was to come without; see `Aggregated.complete`."""
        if not isinstance(answer, Pulled) or not isinstance(answer.average, Version) or answer.average.values:
            return answer
        try:
            ref = ref_of(leaf.request)
            assert isinstance(ref, parameters_pb2.ParametersRef), "the update is one of parameters"
            return replace(answer, average=await self.version(ref, answer.average))
        except OutOfRangeError:  # many rounds have ended since; it is kept for the call, though
            repeated = await again()
            assert isinstance(repeated, Pulled), "the same call gets the same kind of answer"
            return replace(answer, average=repeated.average)


# Saved versions


async def send_version(link: UpstreamLink, request: WithVersion, arrays: Sequence[Array], *, stored: bool) -> Any:
    """Makes a call upstream with the tensors of a saved version; returns the response.

    Args:
        link: The servers upstream.
        request: The request, as it has come.
        arrays: Its tensors, those of values before those of the optimizer's state.
        stored: Whether some of them were stored here. Then they may have other dtypes than components, as only stored
            tensors may, and are stored there, too.

    Raises:
        ServiceError: See `UpstreamLink.call`.
    """
    method = method_of(request)

    def with_tensors(tensors: Sequence[tensor_pb2.Tensor]) -> WithVersion:
        sent = type(request)()
        sent.CopyFrom(request)
        sent.release_handles = True
        supply = iter(tensors)
        for part in sent.values:
            part.dense.CopyFrom(next(supply))
        for slot in sent.state.slots:
            slot.value.CopyFrom(next(supply))
        return sent

    def with_stored() -> Operation[Any]:
        handles = yield from put(arrays, None, "")
        tensors = [tensor_pb2.Tensor(handle=each.handle) for each in handles]
        sent = with_tensors(tensors)
        sent.parameters.CopyFrom(request.parameters)
        try:
            return (yield Unary(service_of(method), method, sent))
        except GradserveError as error:
            yield from delete_quietly([each.handle for each in handles], error)
            raise

    if stored:
        return await link.run_at_home(request.parameters, with_stored())
    return (await link.send(method, request.parameters, arrays, with_tensors))[0]
