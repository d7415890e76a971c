"""Budgets shared by everything on the server, with fair shares for identities and containers."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from weakref import WeakValueDictionary

from gradserve_server.errors import ResourceExhaustedError
from gradserve_server.security.identity import Identity
from gradserve_server.security.shares import ContainerLimits, ContainerShares, OwnLimits, Share, ShareRules, Shares


class Budget:
    """A limit on an amount that is in use at one time.

    Attributes:
        limit: The limit.
        used: What is in use.
        unit: The unit for messages.
        spare: Functions that free caches when a request exceeds what is left; each takes the missing amount.
        owners: The shares that every acquisition also counts against.

    Not thread-safe: used on the event loop only.
    """

    owners: Sequence[Share] = ()

    def __init__(self, limit: int, unit: str, *, each: "Cost | None" = None) -> None:
        """Makes a budget that is not in use.

        Args:
            limit: The limit.
            unit: The unit for messages, e.g. "bytes of tensor memory".
            each: The cost of each unit in another budget.
        """
        self.limit = limit
        self.used = 0
        self.unit = unit
        self.spare: list[Callable[[int], None]] = []
        self._each = each

    @property
    def whole(self) -> "Budget":
        """The budget that this is a part of, or this budget itself."""
        return self

    def part(self, owner: Identity, container: str | None = None) -> "Budget":
        """Returns the budget that an identity uses in a container; without fair shares, the same for all."""
        return self

    def acquire(self, amount: int = 1) -> None:
        """Takes `amount`.

        Raises:
            ResourceExhaustedError: That much is not left; nothing was taken.
        """
        self.check(amount)
        if self._each is not None:
            self._each.budget.acquire(self._each.amount * amount)
        self.count(amount)

    def check(self, amount: int) -> None:
        """Checks that `amount` is left, and that the owners may hold it. An amount of 0 is always allowed.

        Raises:
            ResourceExhaustedError: It is not, or they may not.
        """
        self.check_left(amount)

    def check_left(self, amount: int) -> None:
        """Checks that `amount` is left, regardless of the owners' shares.

        Raises:
            ResourceExhaustedError: It is not.
        """
        if amount <= 0:
            return
        for give_back in self.spare:
            if self.used + amount > self.limit:
                give_back(self.used + amount - self.limit)
        if self.used + amount > self.limit:
            raise ResourceExhaustedError(
                f"too many {self.unit}: {amount} asked for, {self.used} in use, {self.limit} allowed"
            )

    def release(self, amount: int = 1) -> None:
        """Returns `amount` to the budget."""
        self.change(-amount)

    def change(self, amount: int) -> None:
        """Changes the amount in use, without checking the limit."""
        self.count(amount)
        if self._each is not None:
            self._each.budget.change(self._each.amount * amount)

    def count(self, amount: int) -> None:
        """Changes the amount in use of this budget alone, not of the one that `each` costs."""
        self.used += amount

    def hold(self, amount: int = 1) -> "Held":
        """Takes `amount` for the length of a block; entering it raises ResourceExhaustedError if it is not left."""
        return Held(self, amount)


@dataclass(frozen=True)
class Cost:
    """The cost of one unit of something in a budget."""

    budget: Budget
    amount: int

    def part(self, owner: Identity, container: str | None) -> "Cost":
        """Returns the cost to an identity and a container; see `Budget.part`."""
        return Cost(self.budget.part(owner, container), self.amount)


class Held:
    """An amount of a budget, taken for the length of a block. Made by `Budget.hold`."""

    __slots__ = ("_amount", "_budget")

    def __init__(self, budget: Budget, amount: int) -> None:
        self._budget = budget
        self._amount = amount

    def __enter__(self) -> None:
        """Takes it."""
        self._budget.acquire(self._amount)

    def __exit__(self, *_: object) -> None:
        """Returns it."""
        self._budget.release(self._amount)


class Reservation:
    """One holder's share of a budget, which grows and shrinks."""

    __slots__ = ("_budget", "_expected", "used")

    def __init__(self, budget: Budget, used: int = 0) -> None:
        self._budget = budget
        self._expected: list[tuple[Share, int]] | None = None
        self.used = used

    def grow(self, amount: int) -> None:
        """Takes `amount` more.

        Raises:
            ResourceExhaustedError: That much is not left; nothing was taken.
        """
        self._budget.acquire(amount)
        self.used += amount

    def take_over(self, amount: int, giver: "Reservation") -> None:
        """Takes `amount` more: first what another holder has reserved, then the rest from the budget.

        Only a giver that shares the budget can hand anything over; others keep what they have.

        Raises:
            ResourceExhaustedError: The rest is not left, or the owners may not hold it; nothing has changed.
        """
        given = min(giver.used, amount) if self._shares_with(giver) else 0
        self._ask_owners(amount, (giver,))
        self._budget.check_left(amount - given)
        giver.settle(giver.used - given)
        self._budget.change(amount)
        self.used += amount

    def split(self, amount: int) -> "Reservation":
        """Moves `amount` to a new reservation, and returns it."""
        self.used -= amount
        return Reservation(self._budget, amount)

    def another(self) -> "Reservation":
        """Returns an empty reservation of the same holder."""
        return Reservation(self._budget)

    def expect(self, amount: int, givers: Iterable["Reservation"]) -> None:
        """Reserves `amount` in the owners' shares, for memory that givers will hand over, until `settle`.

        Raises:
            ResourceExhaustedError: They may not; nothing has changed.
        """
        asked = self._ask_owners(amount, givers)
        for owner, num in asked:
            owner.held += num
        self._expected = [*(self._expected or ()), *asked]

    def settle(self, amount: int) -> None:
        """Sets the share to `amount` without checking the limit, for existing memory that changes hands."""
        if self._expected is not None:
            for owner, num in self._expected:
                owner.give_back(num)
            self._expected = None
        if amount != self.used:
            self._budget.change(amount - self.used)
            self.used = amount

    def _shares_with(self, other: "Reservation") -> bool:
        return self._budget.whole is other._budget.whole

    def _ask_owners(self, amount: int, givers: Iterable["Reservation"]) -> list[tuple[Share, int]]:
        """Checks that the owners may hold an amount that givers hand over; returns how much is new to each.

        Raises:
            ResourceExhaustedError: They may not.
        """
        if not self._budget.owners:
            return []
        givers = tuple([each for each in givers if self._shares_with(each)])
        new = amount - min(amount, sum([each.used for each in givers]))
        asked = []
        for owner in self._budget.owners:
            own = sum([each.used for each in givers if owner in each._budget.owners])
            missing = amount - min(amount, own)
            owner.check(missing, counted=max(missing - new, 0))
            asked.append((owner, missing))
        return asked


def _no_limit(_limits: OwnLimits | ContainerLimits) -> None:
    return None


class FairBudget(Budget):
    """A budget with fair shares for identities, and limits for containers.

    Attributes:
        identities: What each identity holds.
        containers: What each container holds.
    """

    def __init__(
        self,
        limit: int,
        unit: str,
        rules: ShareRules,
        *,
        each: Cost | None = None,
        of_identity: Callable[[OwnLimits], int | None] = _no_limit,
        of_container: Callable[[ContainerLimits], int | None] = _no_limit,
        retry_after: float | None = None,
    ) -> None:
        """Makes a budget that is not in use.

        Args:
            limit: The limit.
            unit: The unit for messages.
            rules: How much of it an identity or a container may hold.
            each: The cost of each unit in another budget.
            of_identity: Returns the limit from an identity's own limits, or None.
            of_container: Returns the limit from a container's limits, or None.
            retry_after: Seconds after which a refused owner may try again; None if waiting does not help.
        """
        super().__init__(limit, unit, each=each)
        self.identities = Shares(self, rules, of_identity, retry_after)
        self.containers = ContainerShares(self, rules, of_container, retry_after)
        self._rules = rules
        self._has_identities = rules.has_identities
        # Shared by everything of the same identity and container: there can be a million handles.
        self._parts: WeakValueDictionary[tuple[str, str], Budget] = WeakValueDictionary()
        self._parts_without_container: dict[str, Budget] = {}

    @property
    def reserve(self) -> int:
        """The part reserved for identities that hold no more than this."""
        return int(self.limit * self._rules.reserved)

    def missing(self, owner: Identity, amount: int) -> tuple[int, int]:
        """Returns how much must be freed before `owner` may take `amount`: by the owner, and in total."""
        own = self.identities.missing(owner.name, amount)
        held = self.identities.held_by(owner.name)
        reserve = 0 if not owner.name or held + amount <= self.reserve else self.reserve
        return own, max(own, self.used + amount - (self.limit - reserve))

    def part(self, owner: Identity, container: str | None = None) -> Budget:
        """Returns the budget that an identity uses in a container; whatever is taken counts against both.

        Args:
            owner: The identity; the anonymous one if none owns it.
            container: The container, or None.
        """
        name = owner.name if self._has_identities else ""
        if container is None:
            return self._part_without_container(name, owner) if name else self
        part = self._parts.get((name, container))
        if part is None:
            part = self._parts[name, container] = self._new_part(name, owner, container)
        return part

    def _part_without_container(self, name: str, owner: Identity) -> Budget:
        part = self._parts_without_container.get(name)
        if part is None:
            part = self._parts_without_container[name] = self._new_part(name, owner, None)
        return part

    def _new_part(self, name: str, owner: Identity, container: str | None) -> Budget:
        owners = [self.identities.named(name)] if name else []
        if container is not None:
            owners.append(self.containers.named(container))
        return _OwnedPart(self, owners, None if self._each is None else self._each.part(owner, container))


class _OwnedPart(Budget):
    """A fair budget as its owners see it.

    Attributes:
        used: The amount that they have taken.
    """

    def __init__(self, whole: Budget, owners: Sequence[Share], each: Cost | None) -> None:
        super().__init__(whole.limit, whole.unit, each=each)
        self._whole = whole
        self.owners = owners

    @property
    def whole(self) -> Budget:
        return self._whole

    def check(self, amount: int) -> None:
        for owner in self.owners:
            owner.check(amount)
        self._whole.check_left(amount)

    def check_left(self, amount: int) -> None:
        self._whole.check_left(amount)

    def count(self, amount: int) -> None:
        self.used += amount
        self._whole.count(amount)
        for owner in self.owners:
            owner.held += amount


class PurposeBudget(Budget):
    """Usage of another budget for one purpose.

    Attributes:
        used: The amount taken for the purpose.
    """

    def __init__(self, source: Budget) -> None:
        super().__init__(source.limit, source.unit)
        self.owners = source.owners
        self._source = source
        self._parts: WeakValueDictionary[Budget, _PurposePart] = WeakValueDictionary()

    @property
    def whole(self) -> Budget:
        return self._source.whole

    def part(self, owner: Identity, container: str | None = None) -> Budget:
        source = self._source.part(owner, container)
        if source is self._source:
            return self
        part = self._parts.get(source)
        if part is None:
            part = self._parts[source] = _PurposePart(source, self)
        return part

    def check(self, amount: int) -> None:
        self._source.check(amount)

    def check_left(self, amount: int) -> None:
        self._source.check_left(amount)

    def count(self, amount: int) -> None:
        self.used += amount
        self._source.change(amount)


class _PurposePart(PurposeBudget):
    """Usage for the purpose by one identity, or in one container."""

    def __init__(self, source: Budget, of_all: PurposeBudget) -> None:
        super().__init__(source)
        self._of_all = of_all

    def count(self, amount: int) -> None:
        super().count(amount)
        self._of_all.used += amount
