"""A budget is what its reservations have; what is taken of it counts for its owner and its container, too."""

import gc
from collections.abc import Callable

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from gradserve_server.errors import ResourceExhaustedError
from gradserve_server.resources.budget import Budget, Purpose
from gradserve_server.security.identity import ANONYMOUS, ContainerLimits, Identity, OwnLimits, ShareRules

CHIEF, WORKER = Identity("chief"), Identity("worker")
COST = 2


class World:
    """Bytes, of which the chief may have 50, and the container "box" 30; the last 10 are for those with no more."""

    def __init__(self, *, has_identities: bool = True) -> None:
        self.rules = ShareRules(
            0.1,
            lambda name: OwnLimits(max_bytes=50 if name == "chief" else None),
            lambda container: ContainerLimits(max_bytes=30 if container == "box" else None),
            has_identities=has_identities,
        )
        self.bookkeeping = Budget(1000, "bytes of bookkeeping", self.rules)
        self.budget = Budget(
            100,
            "bytes",
            self.rules,
            cost=(self.bookkeeping, COST),
            of_identity=lambda limits: limits.max_bytes,
            of_container=lambda limits: limits.max_bytes,
            retry_after=2.0,
        )

    def held(self, budget: Budget | None = None) -> tuple[int, int, int, int]:
        """Returns what all hold, the chief, the worker, and the container "box"."""
        budget = budget or self.budget
        return budget.used, budget.held_by("chief"), budget.held_by("worker"), budget.held_in("box")


@pytest.fixture
def world() -> World:
    return World()


def test_what_is_taken_counts_for_all(world: World) -> None:
    with world.budget.reserve(10, owner=CHIEF, container="box") as reservation:
        other = reservation.another(5)
        assert world.held() == (15, 15, 0, 15)
        assert world.held(world.bookkeeping) == (30, 30, 0, 30)
    other.settle(12)
    assert (other.used, world.held()) == (12, (12, 12, 0, 12))
    other.settle(0)
    assert world.held() == world.held(world.bookkeeping) == (0, 0, 0, 0)


WHOLE = "too many bytes: "
TOO_MUCH: list[tuple[Identity, str | None, int, int, str]] = [
    (CHIEF, None, 0, 51, "too many bytes of 'chief': 51 asked for, 0 in use, 50 allowed"),
    (CHIEF, "box", 0, 31, "too many bytes in the container 'box': 31 asked for, 0 in use, 30 allowed"),
    (CHIEF, "other", 0, 51, "too many bytes of 'chief'"),
    (WORKER, "box", 0, 31, "too many bytes in the container 'box'"),
    (WORKER, "other", 0, 91, "and the last 10 are reserved for identities that use no more than that"),
    (WORKER, "other", 85, 11, "and the last 10 are reserved for identities that use no more than that"),
    (WORKER, "other", 95, 6, WHOLE),
    (ANONYMOUS, "box", 0, 31, "too many bytes in the container 'box'"),
    (ANONYMOUS, None, 0, 101, WHOLE),
]


@pytest.mark.parametrize(
    ("owner", "container", "used", "amount", "message", "way"),
    [(*each, way) for each in TOO_MUCH for way in ("reserve", "check", "grow", "take_over")]
    # What is expected is there already.
    + [(*each, "expect") for each in TOO_MUCH if each[-1] != WHOLE],
)
def test_who_takes_too_much_gets_nothing(
    world: World, owner: Identity, container: str | None, used: int, amount: int, message: str, way: str
) -> None:
    world.budget.reserve(used)
    reservation, giver = world.budget.reserve(owner=owner, container=container), world.budget.reserve()
    if way == "take_over":
        giver.grow(min(amount, 3))
    if way == "expect":
        giver.settle(amount)
    before = world.held(), world.held(world.bookkeeping)
    take: dict[str, Callable[[int], object]] = {
        "reserve": lambda amount: world.budget.reserve(amount, owner=owner, container=container),
        "check": reservation.check,
        "grow": reservation.grow,
        "take_over": lambda amount: reservation.take_over(amount, giver),
        "expect": lambda amount: reservation.expect(amount, [giver]),
    }
    with pytest.raises(ResourceExhaustedError) as raised:
        take[way](amount)
    assert message in raised.value.message
    assert raised.value.retry_after == (None if message == WHOLE else 2.0)
    assert (world.held(), world.held(world.bookkeeping)) == before
    assert reservation.used == 0
    with world.rules.suspended():
        if owner.name:
            reservation.expect(amount)
            reservation.settle(0)
    giver.settle(min(giver.used, amount - 1))
    take[way](min(amount - 1, 100 - used))


def test_the_reserve_is_for_those_who_hold_no_more_than_that(world: World) -> None:
    worker = world.budget.reserve(90, owner=WORKER)
    with pytest.raises(ResourceExhaustedError) as raised:
        worker.grow(1)
    assert raised.value.message == (
        "too many bytes of 'worker': 1 asked for, 90 in use; 90 of 100 are in use altogether, and the last 10 are "
        "reserved for identities that use no more than that"
    )
    chief = world.budget.reserve(10, owner=CHIEF)
    with pytest.raises(ResourceExhaustedError):
        chief.grow(1)
    worker.settle(60)
    chief.grow(20)
    assert world.held() == (90, 30, 60, 0)


def test_to_take_nothing_is_never_refused(world: World) -> None:
    reservation = world.budget.reserve(owner=CHIEF, container="box")
    reservation.settle(200)
    reservation.grow(0)
    reservation.another(0).take_over(0, world.budget.reserve())


@pytest.mark.parametrize(("given_by", "may_have"), [(CHIEF, 50), (WORKER, 50), (ANONYMOUS, 50)])
def test_what_changes_hands_counts_once(world: World, given_by: Identity, may_have: int) -> None:
    taker, giver = world.budget.reserve(owner=CHIEF), world.budget.reserve(40, owner=given_by)
    taker.take_over(may_have, giver)
    assert (world.held(), giver.used) == ((may_have, may_have, 0, 0), 0)
    back = world.budget.reserve(owner=given_by)
    back.take_over(may_have, taker)
    assert world.held()[1] == (may_have if given_by is CHIEF else 0)


@pytest.mark.parametrize(("given_by", "expected"), [(CHIEF, 40), (WORKER, 80), (ANONYMOUS, 80)])
def test_what_is_expected_counts_for_the_owner_already(world: World, given_by: Identity, expected: int) -> None:
    with world.rules.suspended():
        taker, giver = world.budget.reserve(owner=CHIEF), world.budget.reserve(40, owner=given_by)
        taker.grow(40 if given_by is not CHIEF else 0)
        taker.expect(40, [giver])
    assert world.held() == (40 + taker.used, expected, 40 if given_by is WORKER else 0, 0)
    with pytest.raises(ResourceExhaustedError):
        world.budget.reserve(11, owner=CHIEF)
    taker.settle(taker.used)
    assert world.held()[1] == (40 if given_by is CHIEF else taker.used)


def test_without_identities_only_containers_count() -> None:
    world = World(has_identities=False)
    world.budget.reserve(20, owner=CHIEF)
    reservation = world.budget.reserve(30, owner=CHIEF, container="box")
    assert (reservation.used, world.held()) == (30, (50, 0, 0, 30))


def test_a_container_is_forgotten_with_its_last_reservation(world: World) -> None:
    one = world.budget.reserve(1, container="box")
    other = world.budget.reserve(2, owner=CHIEF, container="box")
    assert (world.held()[3], list(world.budget.containers)) == (3, ["box"])
    del one, other
    gc.collect()
    assert list(world.budget.containers) == list(world.bookkeeping.containers) == []


def test_a_budget_without_rules_has_no_shares() -> None:
    budget = Budget(10, "bytes")
    budget.reserve(10, owner=CHIEF, container="box")
    assert (budget.used, budget.held_by("chief"), budget.held_in("box")) == (10, 0, 0)


NUMBERS = st.integers(0, 40)
PLACES = st.integers(0, 4)


@settings(deadline=None, max_examples=60, stateful_step_count=25)
class Holders(RuleBasedStateMachine):
    """A few holders, who do with their reservations whatever is allowed."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.reservations = [
            self.world.budget.reserve(owner=owner, container=container, purpose=purpose)
            for owner, container, purpose in [
                (ANONYMOUS, None, None),
                (CHIEF, None, Purpose.COMPUTING),
                (CHIEF, "box", Purpose.STORED),
                (WORKER, "box", Purpose.STORED),
                (WORKER, None, Purpose.LAYERS),
            ]
        ]
        self.expected = [0] * len(self.reservations)

    def _try(self, act: Callable[[], object]) -> bool:
        """Returns whether it was allowed; if not, nothing has changed."""
        before = self._all()
        try:
            act()
        except ResourceExhaustedError:
            assert self._all() == before
            return False
        return True

    def _all(self) -> object:
        world = self.world
        used = [each.used for each in self.reservations]
        return used, world.held(), world.held(world.bookkeeping), dict(world.budget.used_for)

    @rule(place=PLACES, amount=NUMBERS)
    def grow(self, place: int, amount: int) -> None:
        if self._try(lambda: self.reservations[place].grow(amount)):
            assert self.world.budget.used <= self.world.budget.limit or not amount

    @rule(place=PLACES, fraction=st.floats(0, 1))
    def shrink(self, place: int, fraction: float) -> None:
        reservation = self.reservations[place]
        reservation.settle(int(reservation.used * fraction))
        self.expected[place] = 0

    @rule(place=PLACES, fraction=st.floats(0, 1))
    def split(self, place: int, fraction: float) -> None:
        reservation = self.reservations[place]
        self.reservations.append(reservation.split(int(reservation.used * fraction)))
        self.expected.append(0)

    @rule(taker=PLACES, giver=PLACES, amount=NUMBERS)
    def take_over(self, taker: int, giver: int, amount: int) -> None:
        if taker != giver and self._try(lambda: self.reservations[taker].take_over(amount, self.reservations[giver])):
            self.expected[giver] = 0

    @rule(taker=PLACES, amount=NUMBERS)
    def expect(self, taker: int, amount: int) -> None:
        if self._try(lambda: self.reservations[taker].expect(amount)):
            self.expected[taker] += amount

    @invariant()
    def everything_adds_up(self) -> None:
        budget, bookkeeping = self.world.budget, self.world.bookkeeping
        assert all(each.used >= 0 for each in self.reservations)
        assert budget.used == sum(each.used for each in self.reservations) == bookkeeping.used // COST
        for purpose, used in budget.used_for.items():
            assert used == sum(each.used for each in self.reservations if each.purpose is purpose)
        for share in [*budget.identities.values(), *budget.containers.values()]:
            held = [index for index, each in enumerate(self.reservations) if share in each.owners]
            used = sum(self.reservations[index].used for index in held)
            assert share.held == used + sum(self.expected[index] for index in held)
            assert share.in_cost is not None
            assert share.in_cost.held == COST * used

    def teardown(self) -> None:
        for reservation in self.reservations:
            with reservation:
                pass
        assert self.world.held() == self.world.held(self.world.bookkeeping) == (0, 0, 0, 0)


TestHolders = Holders.TestCase
