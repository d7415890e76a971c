"""A world whose workers share the parameters of several servers, by rules that look at whole updates.

All servers have state directories: nothing may be lost. Each version that a server makes, and each that a worker gets,
must have the bits that one server would have made of the updates that the home has named.
"""

import asyncio
import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

import gradserve
from gradserve import optim, reductions
from gradserve.calls.identity import CallId
from gradserve_protocol.v1 import accumulator_pb2
from gradserve_server.accumulators.identity import RequestId
from gradserve_server.accumulators.sharding.home import part_id
from gradserve_server.parameters.parameters import Parameters
from gradserve_server.parameters.record import RoundRecord
from gradserve_server.parameters.spec import ParametersSpec
from gradserve_server.resources.registry import ResourceKey
from tests.simulation.accumulators.gradients import MOST
from tests.simulation.parameters.model import Member, Model
from tests.simulation.parameters.updates import marked, values_of, weight_of
from tests.simulation.promises import BrokenPromiseError, check
from tests.simulation.sharding.truth import Truth
from tests.simulation.sharding.worker import Worker
from tests.simulation.sharding.world import World

NAME = "model"
KEY = ResourceKey("default", NAME)
_LAST = MOST - 16
"""The number of updates before those that end a world."""
INITIAL = marked(0, np.float32)
_OPTIMIZERS = (optim.SGD(0.5), optim.SGD(0.5, momentum=0.9), optim.Adam(0.125))
_REDUCTIONS = (
    reductions.mean(),
    reductions.mean(),
    reductions.median(),
    reductions.krum(0),
    reductions.multi_krum(0, 2, report_only=True),
    reductions.geometric_median(),
)


class ParametersTruth(Truth):
    """All that happened to the parameters of one world.

    Attributes:
        rounds: The updates of each round, by the step that it led to.
        models: The expected parameters, by step.
        is_in: The step of each update that counts, by its id.
        accepted: The updates that a worker was told are accepted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rounds: dict[int, tuple[str, ...]] = {}
        self.models: dict[int, Model] = {}
        self.is_in: dict[str, int] = {}
        self.accepted: set[str] = set()
        self._spec: ParametersSpec | None = None
        self._checked: set[tuple[int, int]] = set()

    @property
    def num_rounds(self) -> int:
        """See `Truth`."""
        return len(self.rounds)

    @property
    def spec(self) -> ParametersSpec:
        """The properties that the parameters would have on one server."""
        assert self._spec is not None, "there are parameters"
        return self._spec

    def answered(self, method: str, request: Any, reply: Any) -> None:
        """See `Truth`."""
        super().answered(method, request, reply)
        if method in ("Push", "PushPullParameters") and reply.outcome == accumulator_pb2.APPLY_OUTCOME_ACCEPTED:
            call = request.request_id
            self.accepted.add(part_id(RequestId(call.client_id, call.sequence)))

    def observe(self, run: Any) -> None:
        """Looks at the rounds that a home has ended, and at the newest version of a server."""
        for _, parameters in run.parameters.all():
            if self._spec is None:
                self._begin(parameters.spec)
            if not parameters.spec.follows:
                self._learn(parameters)
            step = parameters.newest.step
            if (id(run), step) not in self._checked:
                self._checked.add((id(run), step))
                self._check_rows(run.place.index, parameters)

    def _begin(self, spec: ParametersSpec) -> None:
        components = tuple([each._replace(pieces=()) for each in spec.components])
        self._spec = replace(spec, components=components, num_shards=0, agreement={})
        self.models[0] = Model.loaded(self._spec, spec.rules.optimizer, INITIAL, None)

    def _learn(self, parameters: Parameters) -> None:
        if parameters.state.step in self.rounds:
            return
        for record in parameters.records(0, 1000)[0]:
            decided = record.decided
            assert decided is not None, "this is the home"
            known = self.rounds.setdefault(record.step, decided.part_ids)
            check(known == decided.part_ids, f"round {record.step} was {known}, and is {decided.part_ids}")
            if record.step not in self.models:
                self._end(record)

    def _end(self, record: RoundRecord) -> None:
        """Computes the parameters after a round, of which each update is in no other."""
        decided = record.decided
        assert decided is not None, "this is the home"
        members = []
        for part, weight in zip(decided.part_ids, decided.weights, strict=True):
            check(part in self.numbers, f"round {record.step} has update {part}, which nobody sent")
            before = self.is_in.setdefault(part, record.step)
            check(before == record.step, f"u{self.numbers[part]} is in rounds {before} and {record.step}")
            members.append(Member(self.numbers[part], weight, self.workers[part][0]))
        model = self.models[record.step - 1].after(members, decided.optimizer, decided.schedule)
        self.models[record.step] = model
        if self.spec.measures_norms:
            by_worker = {each.worker_id: each for each in record.updates}
            for member, report in zip(members, model.reports, strict=True):
                told = by_worker[member.worker_id]
                check(
                    (told.norm, told.dropped) == (report.norm, report.is_dropped),
                    f"round {record.step}: u{member.number} has {told}, not {report}",
                )

    def _check_rows(self, server: int, parameters: Parameters) -> None:
        newest = parameters.newest
        check(newest.step in self.models, f"server {server} has step {newest.step}, which no round led to")
        expected = self.models[newest.step].values
        for component in parameters.spec.components:
            start = 0
            for piece in component.pieces or ():
                rows = expected[component.name]
                if piece.num_rows:
                    rows = rows[start : start + piece.num_rows]
                    start += piece.num_rows
                if piece.server == server:
                    self._check_bits(newest.values[component.name], rows, f"server {server}", newest.step)

    def check_version(self, version: Any) -> None:
        """Checks the bits of a version that a worker got."""
        self.num_averages += 1
        check(version.step in self.models, f"nobody knows of step {version.step}")
        for name, rows in self.models[version.step].values.items():
            self._check_bits(version.components[name], rows, "a worker", version.step)

    @staticmethod
    def _check_bits(found: Any, expected: Any, who: str, step: int) -> None:
        check(found.tobytes() == expected.tobytes(), f"{who} has other bits at step {step}")


class ParametersWorker(Worker):
    """A worker that pushes updates of one model, and reads it."""

    _world: "ParametersWorld"

    def _actions(self) -> list[tuple[float, Any]]:
        return [(0.4, self._push), (0.3, self._push_pull), (0.2, self._read), (0.1, self._send_again)]

    async def parameters(self) -> Any:
        """Returns the parameters, which are made if they are not there."""
        if NAME not in self.opened:
            self.opened[NAME] = await self.client.parameters(INITIAL, NAME, sharded=True, **self._world.properties)
            self._world.note(f"{self.name} opens the model")
        return self.opened[NAME]

    async def _push(self, _name: str) -> None:
        await self.send(self._world.new_gradient(), waits=False)

    async def _push_pull(self, _name: str) -> None:
        await self.send(self._world.new_gradient(), waits=True)

    async def _send_again(self, _name: str) -> None:
        if self._failed:
            _, call, number, step, waits = self._failed.pop(self._chance.randrange(len(self._failed)))
            await self.send(number, (call, step), waits=bool(waits))

    async def _read(self, _name: str) -> None:
        parameters = await self.parameters()
        step = self._chance.choice([None, None, self._steps.get(NAME, 0) + 1])
        self._got(await parameters.read(step, timeout=self._chance.choice([0.5, 3.0])))

    async def send(self, number: int, again: tuple[CallId, int] | None = None, *, waits: bool) -> None:
        """Pushes an update, perhaps by a call that has failed before."""
        parameters, truth = await self.parameters(), self._world.truth
        if number > _LAST:
            return
        step = self._steps.get(NAME, 0)
        if again is None and step and self._chance.random() < 0.1:
            step -= 1
        call, step = again or (self._ids.new_call(), step)
        truth.will_send(call, self._worker_id, number)
        what = f"{self.name}:{call.sequence} {'push_pulls' if waits else 'pushes'} u{number} at {step}"
        self._world.note(what)
        options: dict[str, Any] = {"weight": weight_of(number), "worker_id": self._worker_id}
        options["request_id"] = self._ids.request_id(call)
        update = values_of(number, self._world.truth.spec)
        try:
            if waits:
                pulled = await parameters.push_pull(update, step, timeout=self._chance.choice([0.5, 5.0]), **options)
                self._got(pulled.version)
                outcome = pulled.outcome
            else:
                outcome = (await parameters.push(update, step, **options)).outcome
        except gradserve.GradserveError as error:
            if not isinstance(error, gradserve.AbortedError):
                self._failed.append((NAME, call, number, step, int(waits)))
            raise
        self._world.note(f"{what}: {outcome.name}")

    def _got(self, version: Any) -> None:
        self._world.note(f"{self.name} has step {version.step}")
        self._world.truth.check_version(version)
        self._steps[NAME] = max(self._steps.get(NAME, 0), version.step)

    def _failed_with(self, name: str, action: Any, error: gradserve.GradserveError) -> None:
        self._world.note(f"{self.name} {action.__name__}: {type(error).__name__}: {error}"[:300])
        self._world.count(type(error).__name__)
        expected = gradserve.UnavailableError, gradserve.DeadlineExceededError, gradserve.OutOfRangeError
        is_long_over = isinstance(error, gradserve.AbortedError) and error.field == "request_id"
        if not is_long_over and not isinstance(error, expected):
            raise BrokenPromiseError(f"{type(error).__name__}: {error}") from error

    async def round_of(self, step: int) -> None:
        """Pushes an update to the round after a step; it must count."""
        self._steps[NAME] = step
        parameters, call, number = await self.parameters(), self._ids.new_call(), self._world.new_gradient()
        self._world.truth.will_send(call, self._worker_id, number)
        pushed = await parameters.push(
            values_of(number, self._world.truth.spec),
            step,
            weight=weight_of(number),
            worker_id=self._worker_id,
            request_id=self._ids.request_id(call),
        )
        check(pushed.outcome is not gradserve.Outcome.STALE, "it is of the newest step")


class ParametersWorld(World):
    """Everything that happens to one model for one seed."""

    worker_class = ParametersWorker
    truth: ParametersTruth

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        chance = random.Random(f"parameters {seed}")
        self._has_disk, self._loses_disk = [True] * self._size, None
        self.truth = ParametersTruth()
        reduction = chance.choice(_REDUCTIONS)
        least = 3 if "krum" in str(reduction).lower() else 1
        self.properties: Mapping[str, Any] = {
            "optimizer": chance.choice(_OPTIMIZERS),
            "reduction": reduction,
            "clip_norm": chance.choice([None, 16.0]),
            "num_required": chance.randint(least, 3),
            "max_staleness": chance.choice([0, 2]),
            "deterministic": chance.random() < 0.3,
            "keep_versions": chance.choice([1, 3]),
            "durability": chance.choice(["round", "gradient"]),
        }

    def _look(self) -> None:
        for run in sorted(self._running, key=lambda run: not run.place.is_home(KEY)):
            self.truth.observe(run)

    async def _finish(self, workers: Any) -> None:
        """Ends a round, and checks what is in all rounds, and that nothing is left after a deletion."""
        await asyncio.sleep(10.0)  # what is on its way arrives, and what was given up ends
        for worker in workers:
            worker.opened.clear()
        parameters = await workers[0].parameters()
        for _ in range(3):
            step = (await parameters.info()).step
            for worker in workers:
                if (await parameters.info()).step == step:
                    await worker.round_of(step)
            for worker in workers:
                version = await (await worker.parameters()).read()
                check(version.step > step, f"three workers have pushed, and {step} stays the newest step")
                self.truth.check_version(version)
        (home,) = [each for run in self._running for _, each in run.parameters.all() if not each.spec.follows]
        pending = {each.part for each in home.rounds.members.held}
        lost = self.truth.accepted - self.truth.is_in.keys() - pending
        check(not lost, f"updates were accepted, and are in no round: {lost}")
        await parameters.delete()
        for worker in workers:
            worker.transport.abandon()
        await asyncio.sleep(10.0)
        for run in self._running:
            check(run.used == (0, 0, 0, 0), f"server {run.place.index} counts {run.used} after the end")
