"""Clients that do all that clients may, and check each answer."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

from gradserve_server.accumulators.accumulator import Accumulator
from gradserve_server.accumulators.gradient import Contribution
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
from gradserve_server.resources.registry import ResourceKey
from gradserve_server.storage.journal import Durability
from tests.accumulators.bench import opened
from tests.simulation.accumulators.gradients import MOST, given_away, gradient_of, spec_of
from tests.simulation.accumulators.lending import Lender
from tests.simulation.accumulators.truth import Call, Life
from tests.simulation.network import LostError
from tests.simulation.promises import check
from tests.simulation.server import ID_WINDOW

if TYPE_CHECKING:
    from tests.simulation.accumulators.part import Accumulators

T = TypeVar("T")

_PATIENCE_OF_A_DELETION = 1.0

KEYS = [ResourceKey("test", name) for name in ("a", "b")]


class Client:
    """One worker. What it has sent outlives the server."""

    def __init__(self, name: str, part: "Accumulators", chance: random.Random) -> None:
        self.name = name
        self._part = part
        self._world = part.world
        self._chance = chance
        self._next = 0
        self._open: dict[int, Call] = {}
        """The calls that it may send again."""

    async def work(self) -> None:
        """Asks for one thing after the other, until the world ends."""
        actions: list[tuple[float, Any]] = [
            (0.30, lambda: self._new("apply")),
            (0.25, lambda: self._new("push_pull")),
            (0.15, lambda: self._new("take")),
            (0.25, self._send_again),
            (0.06, self._read),
            (0.05, self._set_step),
            (0.01, self._delete),
        ]
        weights = [weight for weight, _ in actions]
        while not self._world.is_over:
            await asyncio.sleep(self._chance.choice([0.0, 0.001, 0.05, 0.3]))
            (_, action) = self._chance.choices(actions, weights)[0]
            await action()

    # Accumulators

    async def _life(self) -> tuple[Life, Accumulator] | None:
        """Returns an accumulator, which is made if it is not there."""
        key = self._chance.choice(KEYS)
        server, chance = self._world.server, self._chance
        try:
            accumulator = server.accumulators.get(key)
        except NotFoundError:
            pass
        else:
            life = self._part.lives[accumulator.incarnation]
            return (life, accumulator) if life.is_promised else None
        durability = chance.choice([Durability.ROUND, Durability.GRADIENT])
        sparse, deterministic = chance.random() < 0.3, chance.random() < 0.3
        spec = spec_of(durability, sparse=sparse, deterministic=deterministic)
        accumulator, is_new = server.accumulators.create(key, spec)
        assert is_new
        life = Life(key, accumulator.incarnation, durability, sparse, deterministic)
        self._part.lives[life.incarnation] = life
        self._world.note(f"{self.name} creates {key}: {durability.name}{' deterministic' * deterministic}")
        await self._ask(server.journals.settle(), life, f"create {key}")
        if not self._world.is_over and server.failure is None:
            life.is_promised = True
        return None

    async def _delete(self) -> None:
        key = self._chance.choice(KEYS)
        server = self._world.server
        try:
            accumulator = server.accumulators.get(key)
        except NotFoundError:
            return
        life = self._part.lives[accumulator.incarnation]
        if not life.is_promised or self._chance.random() < 0.3:
            return
        await life.until_something_is_added(_PATIENCE_OF_A_DELETION)
        if life.deleting or self._world.is_over:
            return
        life.deleting = True
        life.ended_at = asyncio.get_running_loop().time()
        self._world.note(f"{self.name} deletes {key}")
        server.accumulators.delete(key, life.incarnation)
        done = await self._ask(server.journals.settle(), life, f"delete {key}")
        if done and not self._world.is_over:
            life.is_deleted = True

    async def _set_step(self) -> None:
        found = await self._life()
        if found is None:
            return
        life, accumulator = found
        step = accumulator.rounds.global_step + self._chance.randint(-2, 3)
        life.sets(step)
        self._world.note(f"{self.name} sets the step of {life.key} to {step}")
        if await self._ask(accumulator.set_global_step(step), life, f"set {step}") and not self._world.is_over:
            life.setting.remove(step)

    async def _read(self) -> None:
        found = await self._life()
        if found is not None:
            life, accumulator = found
            step = self._chance.choice([None, accumulator.rounds.global_step, accumulator.rounds.global_step + 1])
            timeout = self._chance.uniform(0.1, 2)
            answer = await self._send(
                lambda: self._ask(accumulator.read_average(step, timeout), life, f"read {step}"), f"read {step}"
            )
            if answer and not self._world.is_over:
                life.see(answer[0], self._world.epoch)

    # Calls with an id

    async def _new(self, kind: str) -> None:
        found = await self._life()
        if found is None or (kind != "take" and self._part.num_gradients >= MOST):
            return
        life, accumulator = found
        chance = self._chance
        number, contribution = None, Contribution()
        if kind != "take":
            number = self._part.new_gradient()
            late = chance.choices([0, -1, 1], [0.9, 0.07, 0.03])[0]
            worker = self.name if life.deterministic or chance.random() < 0.8 else ""
            contribution = Contribution(accumulator.rounds.global_step + late, 1.0, worker, number)
        call = Call(kind, self.name, self._next, life, number, contribution, chance.choice([1, 2, 2, 3]))
        self._next += 1
        life.calls.append(call)
        self._open[call.sequence] = call
        await self._carry_out(call, accumulator)

    async def _send_again(self) -> None:
        """Sends a call again: one whose answer it did not get, or pretends not to have got."""
        if self._open:
            call = self._chance.choice(list(self._open.values()))
            try:
                accumulator = self._world.server.accumulators.get(call.life.key, call.life.incarnation)
            except NotFoundError:
                life = call.life
                check(life.deleting or not life.is_promised, f"{life.key}: {life.incarnation} is gone")
                del self._open[call.sequence]
                return
            await self._carry_out(call, accumulator)

    async def _carry_out(self, call: Call, accumulator: Accumulator) -> None:
        unanswered = frozenset(each for each in self._open if each < call.sequence)
        request = RequestId(self.name, call.sequence, call.kind.encode(), unanswered)
        chance, life = self._chance, call.life
        timeout = chance.choice([0.05, 0.5, 3.0])
        life.note_sent(call, self._world.epoch)
        lender = Lender()

        async def serve() -> tuple[Any] | None:
            if call.kind == "take":
                return await self._ask(accumulator.take(request, call.num_required, timeout), life, str(call), call)
            assert call.number is not None
            gradient = gradient_of(call.number, sparse=life.sparse)
            if call.number % 2:
                return await add(opened(given_away(gradient)))
            lent = lender.lend(gradient)
            try:
                return await add(lent.opening(accumulator.sum_spec, accumulator.place, self._world.server.opener))
            finally:
                lent.close()

        async def add(given: Any) -> tuple[Any] | None:
            life.something_is_added()
            if call.kind == "apply":
                work: Any = accumulator.apply(request, call.contribution, given)
            else:
                work = accumulator.push_pull(request, call.contribution, given, call.num_required, timeout)
            return await self._ask(work, life, str(call), call, lender)

        self._world.note(f"{call} at {call.contribution.local_step} on {life.key}, {'again' * call.is_answered}")
        try:
            answer = await self._send(serve, str(call))
        finally:
            lender.has_left = True
        if self._world.is_over:
            return
        if answer is not None:
            got = answer[0]
            outcome = None if call.kind == "take" else got[0]
            average = {"take": got[0], "apply": None}.get(call.kind, got[1])
            told = "" if outcome is None else f" {outcome.outcome.name} as {outcome.num_accumulated}"
            told += "" if average is None else f" with the average of round {average.round_number}"
            self._world.note(f"{call}:{told}{' (known)' * bool(got[-1])}")
            life.answered(call, outcome, average, self._world.epoch)
        # The client forgets what it has an answer to, or gives up; mostly it does not.
        if chance.random() < (0.4 if answer is not None else 0.1):
            self._forget(call.sequence)
        for sequence in list(self._open)[: -ID_WINDOW - 2]:
            self._forget(sequence)

    def _forget(self, sequence: int) -> None:
        call = self._open.pop(sequence, None)
        if call is not None:
            call.is_given_up = True

    async def _send(self, serve: Callable[[], Awaitable[T | None]], what: str) -> T | None:
        """Returns the answer over the network; None if there is none, for a reason that is allowed."""
        impatient = self._chance.random() < 0.15
        patience = self._chance.choice([0.0, 0.01, 0.2]) if impatient else 5.0
        try:
            return await self._world.network.ask(self.name, serve, patience)
        except LostError:
            self._world.note(f"{what}: no answer within {patience:g} s")
            return None

    async def _ask(
        self, work: Any, life: Life, what: str, call: Call | None = None, lender: Lender | None = None
    ) -> tuple[Any] | None:
        """Returns what the server answers; None if that is an error which is allowed."""
        world = self._world
        try:
            return (await work,)
        except (DeadlineExceededError, OutOfRangeError, AlreadyExistsError) as error:
            now = asyncio.get_running_loop().time()
            has_waited = isinstance(error, DeadlineExceededError) and life.ended_at is not None and now > life.ended_at
            check(world.is_over or not has_waited, f"{what}: it waited on when {life.key} had been deleted")
            return None
        except ServiceError as error:
            if world.is_over:
                return None
            world.note(f"{what}: {type(error).__name__}")
            is_gone = isinstance(error, NotFoundError | AbortedError) and life.deleting
            is_old = isinstance(error, AbortedError) and call is not None and not life.must_remember(call, ID_WINDOW)
            is_abandoned = (
                isinstance(error, AbortedError) and bool(life.abandoned) and "no longer kept" in error.message
            )
            is_full = isinstance(error, ResourceExhaustedError) and world.was_full
            has_failed = isinstance(error, UnavailableError) and world.server.failure is not None
            # Invalid is what a client that has left has written to its memory.
            is_about_memory = isinstance(error, InvalidArgumentError) or getattr(error, "caller_left", False)
            has_left = is_about_memory and lender is not None and lender.has_left
            is_allowed = is_gone or is_old or is_abandoned or is_full or has_failed or has_left
            check(is_allowed, f"{what}: {type(error).__name__}: {error}")
            return None
