"""Clients that do all that workers and chiefs of parameters may, and check each answer."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from gradserve_server.accumulators.gradient import Array, Contribution
from gradserve_server.accumulators.identity import RequestId
from gradserve_server.errors import (
    AbortedError,
    AlreadyExistsError,
    DeadlineExceededError,
    InvalidArgumentError,
    NotFoundError,
    OutOfRangeError,
    ResourceExhaustedError,
    ServiceError,
    UnavailableError,
)
from gradserve_server.parameters.changes import Changes
from gradserve_server.parameters.parameters import Parameters
from gradserve_server.parameters.variables import Loaded, OptimizerState
from gradserve_server.resources.lifetimes import SHARED
from gradserve_server.resources.registry import ResourceKey
from gradserve_server.storage.journal import Durability
from tests.accumulators.bench import opened
from tests.simulation.accumulators.gradients import MOST
from tests.simulation.accumulators.lending import Lender
from tests.simulation.network import LostError
from tests.simulation.parameters.calls import Call
from tests.simulation.parameters.truth import Creation, Life, state_copy
from tests.simulation.parameters.updates import (
    OPTIMIZERS,
    SCHEDULES,
    least_of,
    marked,
    rules_of,
    spec_of,
    update_of,
    weight_of,
)
from tests.simulation.promises import check
from tests.simulation.server import ID_WINDOW

if TYPE_CHECKING:
    from tests.simulation.parameters.part import Parameters as Part

T = TypeVar("T")

_PATIENCE_OF_A_DELETION = 1.0
_LEFT_FOR_THE_END = 8
"""The updates that end rounds when the world ends."""

KEYS = [ResourceKey("test", name) for name in ("p", "q", "fork")]


class Client:
    """One worker, which is a chief now and then. What it has sent outlives the server."""

    def __init__(self, name: str, part: "Part", chance: random.Random) -> None:
        self.name = name
        self._part = part
        self._world = part.world
        self._chance = chance
        self._next = 0
        self._open: dict[int, Call] = {}
        """The calls that it may send again."""
        self._saved: tuple[Life, dict[str, Array], OptimizerState] | None = None

    async def work(self) -> None:
        """Asks for one thing after the other, until the world ends."""
        actions: list[tuple[float, Any]] = [
            (0.35, lambda: self._new("push")),
            (0.25, lambda: self._new("push_pull")),
            (0.25, self._send_again),
            (0.08, self._read),
            (0.06, self._save),
            (0.03, lambda: self._new_change(is_load=False)),
            (0.02, lambda: self._new_change(is_load=True)),
            (0.02, self._fork),
            (0.01, self._delete),
        ]
        weights = [weight for weight, _ in actions]
        while not self._world.is_over:
            await asyncio.sleep(self._chance.choice([0.0, 0.001, 0.05, 0.3]))
            (_, action) = self._chance.choices(actions, weights)[0]
            await action()

    # Parameters

    async def _life(self) -> tuple[Life, Parameters] | None:
        """Returns parameters, which are made if they are not there."""
        key = self._chance.choice(KEYS)
        try:
            parameters = self._world.server.parameters.get(key)
        except NotFoundError:
            if key is not KEYS[-1]:
                await self._create(key)
            return None
        life = self._part.lives.get(parameters.incarnation)
        return (life, parameters) if life is not None and life.is_promised else None

    async def _create(self, key: ResourceKey) -> None:
        mark = self._part.new_mark()
        spec = spec_of(self._chance, mark)
        values = marked(mark, spec.by_name["noise"].dtype)
        creation = Creation(key, spec, values)
        self._part.creations.append(creation)
        assert spec.durability is not None
        traits = [spec.durability.name, type(spec.rules.optimizer).__name__, spec.reduction.name]
        traits += ["deterministic"] * spec.deterministic
        self._world.note(f"{self.name} creates {key}: {', '.join(traits)}, {spec.rules.rounds}")
        registry = self._world.server.parameters

        async def create() -> Parameters:
            made, _ = await registry.create(key, spec, SHARED, Loaded(values))
            await registry.settle()
            return made

        await self._made(create, creation, f"create {key}")

    async def _fork(self) -> None:
        found = await self._life()
        if found is None:
            return
        life, parameters = found
        key = KEYS[-1]
        step = self._chance.choice([None, None, life.step, life.step - 1])
        creation = Creation(key, source=life, step=step)
        self._part.creations.append(creation)
        registry = self._world.server.parameters
        self._world.note(f"{self.name} forks step {step} of {life.key}")

        async def fork() -> Parameters:
            made = await registry.fork(life.key, parameters.incarnation, step, key, SHARED)
            await registry.settle()
            return made

        await self._made(fork, creation, f"fork {life.key}", life)

    async def _made(
        self, create: Callable[[], Awaitable[Parameters]], creation: Creation, what: str, source: Life | None = None
    ) -> None:
        """Carries out a creation or a fork. Its answer says that the parameters are there to stay."""

        async def serve() -> tuple[Parameters] | None:
            return await self._ask(create(), source, what)

        answer = await self._send(serve, what)
        if answer is None or self._world.is_over or self._world.server.failure is not None:
            return
        life = self._part.lives.get(answer[0].incarnation)
        if life is not None and not life.deleting:
            life.is_promised = True

    async def _delete(self) -> None:
        key = self._chance.choice(KEYS)
        server = self._world.server
        try:
            parameters = server.parameters.get(key)
        except NotFoundError:
            return
        life = self._part.lives.get(parameters.incarnation)
        if life is None or not life.is_promised or self._chance.random() < 0.3:
            return
        await life.until_something_is_added(_PATIENCE_OF_A_DELETION)
        if life.deleting or self._world.is_over:
            return
        life.deleting = True
        life.ended_at = asyncio.get_running_loop().time()
        self._world.note(f"{self.name} deletes {key}")
        server.parameters.delete(key, life.incarnation)
        done = await self._ask(server.parameters.settle(), life, f"delete {key}")
        if done and not self._world.is_over:
            life.is_deleted = True

    # Reading

    async def _read(self) -> None:
        found = await self._life()
        if found is None:
            return
        life, parameters = found
        newest = parameters.rounds.global_step
        step = self._chance.choice([None, newest, newest + 1, newest - 1])
        timeout = self._chance.uniform(0.1, 2)
        what = f"read step {step} of {life.key}"
        answer = await self._send(lambda: self._ask(parameters.read(step, timeout), life, what), what)
        if answer and not self._world.is_over:
            (version,) = answer
            check(step in (None, version.step), f"{what}: got step {version.step}")
            life.see(version)

    async def _save(self) -> None:
        """Copies the newest version with its state, to load it some time."""
        found = await self._life()
        if found is None:
            return
        life, parameters = found

        async def save() -> tuple[dict[str, Array], OptimizerState, int]:
            async with parameters.reading_state() as (version, state):
                values: Any = version.values
                return {name: value.copy() for name, value in values.items()}, state_copy(state), version.round_number

        what = f"save {life.key}"
        answer = await self._send(lambda: self._ask(save(), life, what), what, impatience=0.5)
        if answer and not self._world.is_over:
            values, state, number = answer[0]
            check(number in life.seen, f"{what}: there is no round {number}")
            model = life.seen[number].model
            if not life.calls.have_other_optimizers:
                differences = model.differences(state)
                check(not differences, f"{what}: {'; '.join(differences)}")
            self._saved = life, values, state

    # Calls with an id

    async def _new(self, kind: str) -> None:
        found = await self._life()
        if found is None or self._part.num_updates >= MOST - _LEFT_FOR_THE_END:
            return
        life, parameters = found
        chance, number = self._chance, self._part.new_update()
        late = chance.choices([0, 1, 2, 3, -1], [0.75, 0.1, 0.06, 0.06, 0.03])[0]
        named = chance.choice([self.name, self.name, f"{self.name}'"])
        worker = named if life.spec.holds_updates or chance.random() < 0.9 else ""
        step = max(parameters.rounds.global_step - late, 0)
        contribution = Contribution(step, weight_of(number), worker, number)
        call = self._call(kind, life, number, contribution)
        await self._carry_out(call, parameters)

    async def _new_change(self, *, is_load: bool) -> None:
        found = await self._life()
        if found is None:
            return
        life, parameters = found
        chance, number, spec = self._chance, self._part.new_mark(), life.spec
        changes = Changes(
            optimizer=chance.choice([None, *OPTIMIZERS]),
            schedule=chance.choice([None, *SCHEDULES]),
            rounds=rules_of(chance, number, least_of(spec.reduction)),
        )
        if is_load:
            state, step = None, chance.choice([None, None, life.step + 5])
            values = marked(number, spec.by_name["noise"].dtype)
            if self._saved is not None and self._saved[0] is life and chance.random() < 0.7:
                (_, saved, state) = self._saved
                values = {**saved, "mark": values["mark"]}
                changes = replace(changes, optimizer=state.optimizer)
            changes = replace(changes, loaded=Loaded(values, state=state), step=step)
        call = self._call("load" if is_load else "change", life, None, Contribution(), changes)
        await self._carry_out(call, parameters)

    def _call(
        self, kind: str, life: Life, number: int | None, contribution: Contribution, changes: Changes | None = None
    ) -> Call:
        call = Call(kind, self.name, self._next, life, number, contribution, changes)
        self._next += 1
        life.calls.add(call)
        self._open[call.sequence] = call
        return call

    async def _send_again(self) -> None:
        """Sends a call again: one whose answer it did not get, or pretends not to have got."""
        if self._open:
            call = self._chance.choice(list(self._open.values()))
            try:
                parameters = self._world.server.parameters.get(call.life.key, call.life.incarnation)
            except NotFoundError:
                life = call.life
                check(life.deleting or not life.is_promised, f"{life.key}: {life.incarnation} is gone")
                del self._open[call.sequence]
                return
            await self._carry_out(call, parameters)

    async def _carry_out(self, call: Call, parameters: Parameters) -> None:
        unanswered = frozenset(each for each in self._open if each < call.sequence)
        request = RequestId(self.name, call.sequence, call.kind.encode(), unanswered)
        chance, life, world = self._chance, call.life, self._world
        timeout = chance.choice([0.05, 0.5, 3.0])
        life.calls.note_sent(call, world.epoch)
        contribution = call.contribution
        if call.kind == "push" and life.durability is Durability.ROUND and life.calls.is_lost(call, world.epoch):
            contribution, call.was_lost = replace(contribution, was_accepted=True), True
        is_of_the_future = contribution.local_step > parameters.rounds.global_step
        lender = Lender()

        async def serve() -> tuple[Any] | None:
            if call.changes is not None:
                return await self._ask(parameters.change(request, call.changes), life, str(call), call)
            assert call.number is not None
            update = update_of(call.number, life.spec, is_given_away=bool(call.number % 2))
            if call.number % 2:
                return await push(opened(update))
            lent = lender.lend(update)
            try:
                spec = parameters.spec.of_update(list(update.values))
                return await push(lent.opening(spec, parameters.place, world.server.opener))
            finally:
                lent.close()

        async def push(given: Any) -> tuple[Any] | None:
            life.something_is_added()
            if call.kind == "push":
                work: Any = parameters.push(request, contribution, given)
            else:
                work = parameters.push_pull(request, contribution, given, timeout)
            return await self._ask(work, life, str(call), call, lender, is_of_the_future=is_of_the_future)

        again = " again" * call.is_answered + ", lost" * contribution.was_accepted
        world.note(f"{call} at {contribution.local_step} on {life.key}{again}")
        try:
            answer = await self._send(serve, str(call))
        finally:
            lender.has_left = True
        if world.is_over:
            return
        if answer is not None and call.changes is not None:
            call.epoch = world.epoch
            world.note(f"{call}: done")
            check(call.is_applied or life.deleting, f"{call}: it was answered, and has no effect")
        elif answer is not None:
            outcome, *versions, is_known = answer[0]
            version = versions[0] if versions else None
            told = "" if version is None else f" with round {version.round_number}"
            world.note(f"{call}: {outcome.outcome.name} as {outcome.num_accumulated}{told}{' (known)' * is_known}")
            is_stale_after_all = contribution.was_accepted and outcome.round is None
            check(not is_stale_after_all, f"{call}: it was accepted and lost, and is now too late")
            life.calls.answered(call, outcome, version, world.epoch)
        # The client forgets what it has an answer to, or gives up; mostly it does not.
        if chance.random() < (0.4 if answer is not None else 0.1):
            self._forget(call.sequence)
        for sequence in list(self._open)[: -ID_WINDOW - 2]:
            self._forget(sequence)

    def _forget(self, sequence: int) -> None:
        call = self._open.pop(sequence, None)
        if call is not None:
            call.is_given_up = True

    async def _send(self, serve: Callable[[], Awaitable[T | None]], what: str, impatience: float = 0.15) -> T | None:
        """Returns the answer over the network; None if there is none, for a reason that is allowed.

        Args:
            serve: Carries out the request.
            what: The request.
            impatience: How likely the client leaves soon.
        """
        impatient = self._chance.random() < impatience
        patience = self._chance.choice([0.0, 0.01, 0.2]) if impatient else 5.0
        try:
            return await self._world.network.ask(self.name, serve, patience)
        except LostError:
            self._world.note(f"{what}: no answer within {patience:g} s")
            return None

    async def _ask(
        self,
        work: Any,
        life: Life | None,
        what: str,
        call: Call | None = None,
        lender: Lender | None = None,
        *,
        is_of_the_future: bool = False,
    ) -> tuple[Any] | None:
        """Returns what the server answers; None if that is an error which is allowed."""
        world = self._world
        try:
            return (await work,)
        except (DeadlineExceededError, OutOfRangeError, AlreadyExistsError) as error:
            now, ended_at = asyncio.get_running_loop().time(), None if life is None else life.ended_at
            has_waited = isinstance(error, DeadlineExceededError) and ended_at is not None and now > ended_at
            check(world.is_over or not has_waited, f"{what}: it waited on after the deletion")
            if call is not None and isinstance(error, DeadlineExceededError) and not world.is_over:
                call.life.calls.check_too_late(call)
            return None
        except ServiceError as error:
            if world.is_over:
                return None
            world.note(f"{what}: {type(error).__name__}")
            is_gone = isinstance(error, NotFoundError | AbortedError) and (life is None or life.deleting)
            is_new = isinstance(error, NotFoundError) and "being created" in error.message
            is_old = False
            if isinstance(error, AbortedError) and call is not None:
                is_old = not call.life.calls.must_remember(call, ID_WINDOW)
            has_loads = life is not None and bool(life.dropped)
            about_loads = ("other values were loaded", "no longer kept")
            is_dropped = (
                isinstance(error, AbortedError) and has_loads and any(map(error.message.__contains__, about_loads))
            )
            is_full = isinstance(error, ResourceExhaustedError) and world.was_full
            has_failed = isinstance(error, UnavailableError) and world.server.failure is not None
            is_early = isinstance(error, InvalidArgumentError) and is_of_the_future and error.field == "local_step"
            # Invalid is what a client that has left has written to its memory.
            is_about_memory = isinstance(error, InvalidArgumentError) or getattr(error, "caller_left", False)
            has_left = is_about_memory and lender is not None and lender.has_left
            is_allowed = any([is_gone, is_new, is_old, is_dropped, is_full, has_failed, is_early, has_left])
            check(is_allowed, f"{what}: {type(error).__name__}: {error}")
            return None
