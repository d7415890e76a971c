"""What is taken of a budget counts for its owner and its container, too."""

import gc

import pytest

from gradserve_server.errors import ResourceExhaustedError
from gradserve_server.resources.budget import Budget, Cost, FairBudget, Reservation
from gradserve_server.security.identity import ANONYMOUS, Identity
from gradserve_server.security.shares import ContainerLimits, OwnLimits, ShareRules

CHIEF, WORKER = Identity("chief"), Identity("worker")


class World:
    """Bytes, of which the chief may have 50, and the container "box" 30; half of them are reserved."""

    def __init__(self, *, has_identities: bool = True) -> None:
        self.rules = ShareRules(
            0.1,
            lambda name: OwnLimits(max_bytes=50 if name == "chief" else None),
            lambda container: ContainerLimits(max_bytes=30 if container == "box" else None),
            has_identities=has_identities,
        )
        self.bookkeeping = FairBudget(1000, "bytes of bookkeeping", self.rules)
        self.budget = FairBudget(
            100,
            "bytes",
            self.rules,
            each=Cost(self.bookkeeping, 2),
            of_identity=lambda limits: limits.max_bytes,
            of_container=lambda limits: limits.max_bytes,
        )

    def held(self, budget: FairBudget | None = None) -> tuple[int, int, int, int]:
        """Returns what all hold, the chief, the worker, and the container "box"."""
        budget = budget or self.budget
        identities, containers = budget.identities, budget.containers
        of_names = identities.held_by("chief"), identities.held_by("worker")
        return (budget.used, *of_names, containers.held_by("box"))


@pytest.fixture
def world() -> World:
    return World()


def test_what_is_taken_counts_for_all(world: World) -> None:
    part = world.budget.part(CHIEF, "box")
    with part.hold(10):
        part.acquire(5)
        assert world.held() == (15, 15, 0, 15)
        assert world.held(world.bookkeeping) == (30, 30, 0, 30)
    part.change(7)
    assert (part.used, world.held()) == (12, (12, 12, 0, 12))
    part.release(12)
    assert world.held() == world.held(world.bookkeeping) == (0, 0, 0, 0)


WHOLE = "too many bytes: "
TOO_MUCH: list[tuple[Identity, str | None, int, int, str]] = [
    (CHIEF, None, 0, 51, "too many bytes of 'chief': 51 asked for, 0 in use, 50 allowed"),
    (CHIEF, "box", 0, 31, "too many bytes in the container 'box': 31 asked for, 0 in use, 30 allowed"),
    (CHIEF, "other", 0, 51, "too many bytes of 'chief'"),
    (WORKER, "box", 0, 31, "too many bytes in the container 'box'"),
    (WORKER, "other", 0, 91, "and the last 10 are for those who use no more than that"),
    (WORKER, "other", 85, 11, "and the last 10 are for those who use no more than that"),
    (WORKER, "other", 95, 6, WHOLE),
    (ANONYMOUS, "box", 0, 31, "too many bytes in the container 'box'"),
    (ANONYMOUS, None, 0, 101, WHOLE),
]


@pytest.mark.parametrize(
    ("owner", "container", "used", "amount", "message", "way"),
    [(*each, way) for each in TOO_MUCH for way in ("acquire", "grow", "take_over")]
    # What is expected is there already.
    + [(*each, "expect") for each in TOO_MUCH if each[-1] != WHOLE],
)
def test_who_takes_too_much_gets_nothing(
    world: World, owner: Identity, container: str | None, used: int, amount: int, message: str, way: str
) -> None:
    world.budget.change(used)
    part = world.budget.part(owner, container)
    reservation, giver = Reservation(part), Reservation(world.budget)
    if way == "take_over":
        giver.grow(min(amount, 3))
    if way == "expect":
        giver.settle(amount)
    before = world.held(), world.held(world.bookkeeping)

    def take(amount: int) -> None:
        match way:
            case "acquire":
                part.acquire(amount)
            case "grow":
                reservation.grow(amount)
            case "take_over":
                reservation.take_over(amount, giver)
            case _:
                reservation.expect(amount, [giver])

    with pytest.raises(ResourceExhaustedError) as raised:
        take(amount)
    assert message in raised.value.message
    assert (world.held(), world.held(world.bookkeeping)) == before
    assert reservation.used == 0
    with world.rules.suspended():
        if owner.name:
            reservation.expect(amount, [])
            reservation.settle(0)
    giver.settle(min(giver.used, amount - 1))
    take(min(amount - 1, 100 - used))


def test_to_take_nothing_is_never_refused(world: World) -> None:
    part = world.budget.part(CHIEF, "box")
    part.change(200)
    part.acquire(0)
    Reservation(part).grow(0)
    Reservation(part).take_over(0, Reservation(world.budget))


@pytest.mark.parametrize(("given_by", "may_have"), [(CHIEF, 50), (WORKER, 50), (ANONYMOUS, 50)])
def test_what_changes_hands_counts_once(world: World, given_by: Identity, may_have: int) -> None:
    taker, giver = Reservation(world.budget.part(CHIEF)), Reservation(world.budget.part(given_by))
    giver.grow(40)
    taker.take_over(may_have, giver)
    assert (world.held(), giver.used) == ((may_have, may_have, 0, 0), 0)
    back = Reservation(world.budget.part(given_by))
    back.take_over(may_have, taker)
    assert world.held()[1] == (may_have if given_by is CHIEF else 0)


@pytest.mark.parametrize(("given_by", "expected"), [(CHIEF, 40), (WORKER, 80), (ANONYMOUS, 80)])
def test_what_is_expected_counts_for_the_owner_already(world: World, given_by: Identity, expected: int) -> None:
    with world.rules.suspended():
        taker, giver = Reservation(world.budget.part(CHIEF)), Reservation(world.budget.part(given_by))
        giver.grow(40)
        taker.grow(40 if given_by is not CHIEF else 0)
        taker.expect(40, [giver])
    assert world.held() == (40 + taker.used, expected, 40 if given_by is WORKER else 0, 0)
    with pytest.raises(ResourceExhaustedError):
        Reservation(world.budget.part(CHIEF)).grow(11)
    taker.settle(taker.used)
    assert world.held()[1] == (40 if given_by is CHIEF else taker.used)


def test_without_identities_only_containers_count() -> None:
    world = World(has_identities=False)
    assert world.budget.part(CHIEF) is world.budget
    part = world.budget.part(CHIEF, "box")
    part.acquire(30)
    assert (part.used, world.held()) == (30, (30, 0, 0, 30))


def test_a_container_is_forgotten_with_its_last_part(world: World) -> None:
    part = world.budget.part(ANONYMOUS, "box")
    assert world.budget.part(ANONYMOUS, "box") is part
    other = world.budget.part(CHIEF, "box")
    part.acquire(1)
    other.acquire(2)
    assert (world.held()[3], world.budget.containers.names(10)) == (3, ["box"])
    del part, other
    gc.collect()
    assert world.budget.containers.names(10) == []


def test_a_plain_budget_has_no_parts() -> None:
    budget = Budget(10, "bytes")
    assert budget.part(CHIEF, "box") is budget
