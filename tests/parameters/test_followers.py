"""Sharded parameters in random worlds: what every server makes of the home's rounds has the bits of one server.

Updates are staged in any order, or never pushed; rounds are told late, twice, out of order or in part; rules change,
values are loaded, memory runs out, and servers crash and are restored from their directories.
"""

import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from gradserve_protocol.v1 import parameters_messages_pb2 as messages_pb2
from gradserve_protocol.v1 import parameters_pb2
from gradserve_server.accumulators import changes as changes_module
from gradserve_server.accumulators.gradient import Contribution, Gradient, Measurement
from gradserve_server.accumulators.identity import RequestId
from gradserve_server.accumulators.journal import PartKey, ShardJournal
from gradserve_server.accumulators.rounds import Outcome
from gradserve_server.accumulators.sharding.home import Decision, part_id
from gradserve_server.accumulators.sharding.shard import Shard
from gradserve_server.accumulators.spec import ComponentSpec, PartialShape, Piece
from gradserve_server.errors import AbortedError, InvalidArgumentError, ResourceExhaustedError
from gradserve_server.parameters.changes import Changes
from gradserve_server.parameters.optimizers.optimizer import Schedule, ScheduleKind
from gradserve_server.parameters.parameters import Parameters
from gradserve_server.parameters.record import DecidedRound
from gradserve_server.parameters.reductions import GeometricMedian, Krum, Mean, Median, Reduction
from gradserve_server.parameters.round_rules import PolynomialDiscount, RoundRules, Staleness
from gradserve_server.parameters.sharding import Follower
from gradserve_server.parameters.spec import ParametersSpec, Rules
from gradserve_server.parameters.variables import Loaded
from gradserve_server.resources.cluster import Member
from gradserve_server.resources.lifetimes import SHARED
from gradserve_server.resources.registry import ResourceKey
from gradserve_server.rpc.parameters.updates import decode_staged_update
from gradserve_server.storage.journal import Durability
from tests.cluster.servers import name_at
from tests.parameters.bench import ParametersBench, adam, sgd
from tests.parameters.durable.disk import Disk

SIZE = 3
KEY = ResourceKey("default", name_at(0, SIZE))
SHAPES: Mapping[str, tuple[tuple[int, ...], Any, tuple[Piece, ...]]] = {
    "kernel": ((6, 2), np.float32, (Piece(0, 3), Piece(1, 1), Piece(2, 2))),
    "bias": ((4,), np.float64, (Piece(1, 0),)),
    "scale": ((5,), ml_dtypes.bfloat16, (Piece(2, 4), Piece(0, 1))),
}
REDUCTIONS: tuple[Reduction, ...] = (
    Mean(),
    Mean(),
    Median(),
    Krum(0),
    Krum(0, 2, report_only=True),
    GeometricMedian(),
)
OPTIMIZERS = (sgd(0.5), sgd(0.1, momentum=0.9), adam(0.05))
SCHEDULES = (Schedule(), Schedule(warmup=2, kind=ScheduleKind.LINEAR, rounds=9, end=0.1))


def values_of(chance: random.Random) -> dict[str, Any]:
    generator = np.random.default_rng(chance.randrange(1 << 30))
    return {name: generator.standard_normal(shape).astype(dtype) for name, (shape, dtype, _) in SHAPES.items()}


def part_of(values: Mapping[str, Any], server: int) -> dict[str, Any]:
    """Returns a server's rows."""
    part = {}
    for name, (_, _, pieces) in SHAPES.items():
        start = 0
        for piece in pieces:
            if piece.server == server:
                part[name] = values[name][start : start + piece.num_rows] if piece.num_rows else values[name]
            start += piece.num_rows
    return part


def opened(values: Mapping[str, Any]) -> Any:
    return lambda use: use(Gradient({name: np.copy(value) for name, value in values.items()}, owned=True))


@dataclass(eq=False)
class Update:
    """An update of a worker.

    Attributes:
        call: The id of its call.
        values: Its values.
        contribution: Its step, weight and worker.
        epoch: The epoch that its client knows.
        staged: The servers that hold it, as far as its client knows, with what they have measured.
    """

    call: RequestId
    values: Mapping[str, Any]
    contribution: Contribution
    epoch: int
    staged: dict[int, Measurement | None] = field(default_factory=dict)


class World:
    """A home, two followers, and parameters on one server that get the same updates."""

    def __init__(self, chance: random.Random, folder: Path) -> None:
        self.chance = chance
        self.folder = folder
        self.disks: list[Disk] = []
        self.updates: list[Update] = []
        self.number = 0
        self.epoch = 0
        self.crashes = [0] * SIZE
        deterministic = chance.random() < 0.3
        reduction = chance.choice(REDUCTIONS)
        num_required = 3 if isinstance(reduction, Krum) else chance.choice((1, 2, 3))
        self.spec = ParametersSpec(
            tuple(
                [
                    ComponentSpec(name, np.dtype(dtype), PartialShape(shape), pieces=pieces)
                    for name, (shape, dtype, pieces) in SHAPES.items()
                ]
            ),
            Rules(chance.choice(OPTIMIZERS), RoundRules(num_required), Schedule()),
            staleness=chance.choice((Staleness(), Staleness(2, PolynomialDiscount(0.5)))),
            reduction=reduction,
            clip_norm=chance.choice((None, 4.0)),
            deterministic=deterministic,
            durability=Durability.GRADIENT,
            num_shards=SIZE,
        )

    async def begin(self) -> None:
        initial = values_of(self.chance)
        whole = replace(
            self.spec,
            components=tuple([each._replace(pieces=()) for each in self.spec.components]),
            num_shards=0,
            durability=Durability.NONE,
        )
        self.bench = ParametersBench()
        self.whole, _ = await self.bench.registry.create(KEY, whole, SHARED, Loaded(initial))
        for server in range(SIZE):
            path = self.folder / str(server)
            self.disks.append(await Disk.open(path, Durability.GRADIENT, member=Member("c", server, SIZE)))
        self.incarnation = self.disks[0].bench.registry.hand_out(KEY)
        for server in (1, 2, 0):
            disk = self.disks[server]
            spec = self.spec.placed(Member("c", server, SIZE), KEY)
            await disk.bench.registry.create(
                KEY, spec, SHARED, Loaded(part_of(initial, server)), home_incarnation=self.incarnation
            )
            await disk.journals.settle()

    def shard(self, server: int) -> Parameters:
        return self.disks[server].found(KEY)

    def decided(self, since: int) -> list[DecidedRound]:
        """Returns the rounds after a step that the home has ended."""
        records, _ = self.shard(0).records(since, 1000)
        return [each.decided for each in records if each.decided is not None]

    # What happens

    async def stage(self) -> None:
        if not self.updates or self.chance.random() < 0.5:
            self.number += 1
            step = max(self.whole.state.step - self.chance.choice((0, 0, 0, 1, 2)), 0)
            worker = self.chance.choice("abcd")
            contribution = Contribution(
                local_step=step, weight=self.chance.choice((1.0, 0.5, 3.0)), worker_id=worker, sequence=self.number
            )
            self.updates.append(Update(RequestId("c", self.number), values_of(self.chance), contribution, self.epoch))
        update = self.chance.choice(self.updates)
        for server in self.chance.sample(range(SIZE), self.chance.randint(1, SIZE)):
            await self.stage_on(server, update)

    async def stage_on(self, server: int, update: Update) -> None:
        shard = self.shard(server).shard
        assert shard is not None
        key = PartKey(self.incarnation, part_id(update.call))
        values = opened(part_of(update.values, server))
        await shard.stage(key, update.contribution.local_step, values, epoch=update.epoch)
        update.staged[server] = await self.shard(server).measure(key)

    async def push(self) -> None:
        ready = [each for each in self.updates if len(each.staged) == SIZE]
        if not ready:
            return
        update = self.chance.choice(ready)
        home, part = self.shard(0), part_id(update.call)
        assert home.shard is not None
        measured = tuple([each for _, each in sorted(update.staged.items()) if each is not None])
        contribution = replace(update.contribution, part=part, epoch=update.epoch, measured=measured)
        try:
            pushed, duplicate = await home.push(
                update.call, contribution, home.shard.opening(PartKey(self.incarnation, part))
            )
        except AbortedError as error:
            if error.field not in ("update", "epoch"):
                raise
            update.staged.clear()
            update.epoch = self.epoch
            return
        expected, again = await self.whole.push(update.call, update.contribution, opened(update.values))
        assert (pushed.outcome, pushed.weight) == (expected.outcome, expected.weight)
        assert duplicate == again or pushed.outcome is not Outcome.ACCEPTED, "a crash forgets what did not count"
        if pushed.outcome is not Outcome.ACCEPTED or self.chance.random() < 0.8:
            self.updates.remove(update)  # otherwise its client sends it again

    async def follow(self) -> None:
        server = self.chance.choice((1, 2))
        follower = self.shard(server)
        step = follower.state.step
        rounds = self.decided(max(step - self.chance.choice((0, 0, 1, 3)), 0))
        if self.chance.random() < 0.2:
            rounds = rounds[1:]
        if self.chance.random() < 0.3:
            rounds = rounds[: self.chance.randint(0, len(rounds))]
        memory = self.disks[server].bench.memory
        is_full = self.chance.random() < 0.1
        limit, memory.limit = memory.limit, memory.used if is_full else memory.limit
        before = follower.newest
        try:
            await follower.follow(rounds)
        except AbortedError:
            assert rounds, "there is nothing to refuse"
            assert follower.newest.step >= before.step
        except ResourceExhaustedError:
            assert is_full
        finally:
            memory.limit = limit

    async def change(self) -> None:
        changes = Changes(optimizer=self.chance.choice(OPTIMIZERS), schedule=self.chance.choice(SCHEDULES))
        self.number += 1
        for each in (self.shard(0), self.whole):
            await each.change(RequestId("c", self.number), changes)

    async def load(self) -> None:
        values = values_of(self.chance)
        self.number += 1
        call = RequestId("c", self.number)
        for server in (1, 2):
            await self.shard(server).hold(part_id(call), Loaded(part_of(values, server)))
        step = self.whole.state.step + self.chance.choice((0, 5))
        await self.shard(0).change(call, Changes(loaded=Loaded(part_of(values, 0)), step=step))
        await self.whole.change(call, Changes(loaded=Loaded(values), step=step))
        for server in (1, 2):  # as `load` of the client does; a crash before that is in tests of the cluster
            await self.shard(server).follow(self.decided(self.shard(server).state.step))

    async def forget(self) -> None:
        self.epoch, counted = await self.shard(0).count_updates()
        for server in self.chance.sample(range(SIZE), 2):
            shard = self.shard(server).shard
            assert shard is not None
            await shard.forget(self.epoch, frozenset(counted))

    async def crash(self) -> None:
        server = self.chance.randrange(SIZE)
        self.crashes[server] += 1
        crashed = self.disks[server]
        self.disks[server] = await crashed.after_crash()
        crashed.store.close()
        if server == 0:
            for update in self.updates:
                update.staged.pop(0, None)

    async def last_round(self) -> None:
        """Has three workers push updates that all servers hold: whatever has happened, they count."""
        step = self.whole.state.step
        self.updates = []
        for number, worker in enumerate("xyz", self.number + 1):
            contribution = Contribution(local_step=step, worker_id=worker, sequence=number)
            update = Update(RequestId("c", number), values_of(self.chance), contribution, self.epoch)
            for server in range(SIZE):
                await self.stage_on(server, update)
            self.updates = [update]
            await self.push()
            assert update.staged or self.whole.state.step > step, "it does not count"
        assert self.whole.state.step > step

    async def end(self) -> None:
        """Ends another round, brings every server up to date, and compares all."""
        await self.last_round()
        for server in (1, 2):
            await self.shard(server).follow(self.decided(self.shard(server).state.step))
        expected = self.whole.newest
        for server in range(SIZE):
            newest = self.shard(server).newest
            assert newest.step == expected.step
            for name, part in part_of(expected.values, server).items():
                np.testing.assert_array_equal(np.asarray(newest.values[name]), part)
        if self.spec.measures_norms:
            of_whole = {each.step: each for each in self.whole.records(0, 1000)[0]}
            for record in self.shard(0).records(0, 1000)[0]:
                if record.updates:  # and not a record of loaded values
                    told = [(each.norm, each.dropped) for each in record.updates]
                    assert told == [(each.norm, each.dropped) for each in of_whole[record.step].updates]
        found, whole = self.shard(0).ledger.weights, self.whole.ledger.weights
        assert (found.accepted, found.applied, found.pending) == (whole.accepted, whole.applied, whole.pending)

    def close(self) -> None:
        for disk in self.disks:
            disk.close()


async def play(seed: int, folder: Path) -> World:
    world = World(random.Random(seed), folder)
    try:
        await world.begin()
        steps: list[Callable[[], Awaitable[None]]] = [world.stage, world.stage, world.push, world.push]
        rare: list[Callable[[], Awaitable[None]]] = [world.change, world.forget, world.crash]
        if seed % 3:  # otherwise servers learn of all rounds at the end
            steps += [world.follow, world.follow]
            rare.append(world.load)
        for _ in range(120):
            await world.chance.choice(rare if world.chance.random() < 0.08 else steps)()
        await world.end()
    finally:
        world.close()
    return world


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("seed", range(40))
async def test_every_server_has_the_bits_of_one(tmp_path: Path, seed: int) -> None:
    await play(seed, tmp_path)


def _forget_too_much(patch: pytest.MonkeyPatch) -> None:
    forget_older = Shard.forget_older
    patch.setattr(Shard, "forget_older", lambda shard, step: forget_older(shard, step + 1))


def _forget_what_a_late_server_needs(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Parameters, "count_updates", lambda parameters: parameters._changes.end_epoch())


def _keep_updates_in_memory_alone(patch: pytest.MonkeyPatch) -> None:
    async def accept(*_: Any) -> None:
        return None

    patch.setattr(ShardJournal, "accept", accept)


def _count_updates_of_earlier_epochs(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(changes_module, "check_epoch", lambda *_: None)


def _name_updates_in_another_order(patch: pytest.MonkeyPatch) -> None:
    parts = Decision.parts

    def backwards(decision: Decision, rounds: Any) -> Any:
        found = parts(decision, rounds)
        return replace(found, ids=found.ids[::-1], weights=found.weights[::-1])

    patch.setattr(Decision, "parts", backwards)


def _tell_no_schedule(patch: pytest.MonkeyPatch) -> None:
    records = Parameters.records

    def without(parameters: Parameters, since: int, most: int) -> Any:
        found, more = records(parameters, since, most)
        told = [replace(each, decided=each.decided and replace(each.decided, schedule=Schedule())) for each in found]
        return told, more

    patch.setattr(Parameters, "records", without)


def _make_a_round_twice(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Follower, "_step", property(lambda follower: follower._ledger.rounds.global_step - 1))


def _load_without_the_values_before(patch: pytest.MonkeyPatch) -> None:
    async def hold(*_: Any) -> None:
        return None

    patch.setattr(Follower, "hold", hold)


FAULTS = (
    _forget_too_much,
    _forget_what_a_late_server_needs,
    _keep_updates_in_memory_alone,
    _count_updates_of_earlier_epochs,
    _name_updates_in_another_order,
    _tell_no_schedule,
    _make_a_round_twice,
    _load_without_the_values_before,
)


@pytest.mark.exhaustive
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__.strip("_"))
async def test_planted_faults_are_found(
    tmp_path: Path, fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    for seed in range(60):
        folder = tmp_path / str(seed)
        folder.mkdir()
        try:
            await play(seed, folder)
        except Exception:
            return
    pytest.fail("60 worlds did not notice it")


def measurement(server: int, *squared_norm: float, **more: Any) -> parameters_pb2.Measurement:
    return parameters_pb2.Measurement(server=server, squared_norm=squared_norm, **more)


SHORT = [parameters_pb2.SquaredDistance(part_id=b"short", terms=[1.0])]


@pytest.mark.parametrize(
    ("measured", "clip_norm", "error", "field", "match"),
    [
        ([], 1.0, InvalidArgumentError, "measured", "by 2 other servers, got 0"),
        ([measurement(1, 1.0)], None, InvalidArgumentError, "measured", "by 0 other servers, got 1"),
        ([measurement(1, 1.0)], 1.0, InvalidArgumentError, "measured", r"servers \[1, 2\], got those of \[1\]"),
        ([measurement(1, 1.0), measurement(2, np.nan)], 1.0, InvalidArgumentError, "measured[1]", "NaN"),
        ([measurement(1, 1.0, squared_distances=SHORT)], 1.0, InvalidArgumentError, "measured[0]", "16 bytes"),
        ([measurement(1, 1.0), measurement(2)], 1.0, AbortedError, "update", "stage it again"),
    ],
)
def test_measurements_that_do_not_fit(measured: Any, clip_norm: Any, error: Any, field: str, match: str) -> None:
    world = World(random.Random(1), Path())
    spec = replace(world.spec, clip_norm=clip_norm, reduction=Mean()).placed(Member("c", 0, SIZE), KEY)
    request = messages_pb2.PushRequest(measured=measured)
    request.request_id.client_id = "c"
    with pytest.raises(error, match=match) as raised:
        decode_staged_update(request, "1", spec)
    assert raised.value.field.startswith(field)
