"""Budgets that everything on the server shares, and the reservations that their holders have."""

from collections.abc import Callable, Iterable
from enum import Enum
from operator import attrgetter
from typing import Self
from weakref import WeakValueDictionary

from gradserve_server.errors import ResourceExhaustedError
from gradserve_server.limits import quoted
from gradserve_server.security.identity import ANONYMOUS, ContainerLimits, Identity, OwnLimits, ShareRules

UNLIMITED = 1 << 62
"""A limit that nothing reaches."""


class Purpose(Enum):
    """The purposes for which memory is reserved."""

    COMPUTING = "computing"
    """Calls in flight: payloads, outputs, copies of inputs, and scratch memory."""
    STORED = "stored"
    """Stored tensors."""
    ACCUMULATORS = "accumulators"
    """Sums and averages of accumulators."""
    LAYERS = "layers"
    """Variables of layers, and what they keep of forwards."""


class Budget:
    """A limit on an amount that is in use at one time, with fair shares for identities, and limits for containers.

    A part of the limit is reserved for identities that hold no more than that part: however much others take, somebody
    new gets something. The anonymous identity, which everybody is without access control, is refused nothing.

    Attributes:
        limit: The limit.
        used: The sum of all reservations.
        used_for: The part of it that is reserved for each purpose.
        unit: The unit for messages.
        identities: The shares of identities by name.
        containers: The shares of containers by name, as long as there are reservations in them.
        spare: Functions that free caches when a request exceeds what is left; each takes the missing amount.

    Not thread-safe: used on the event loop only.
    """

    def __init__(
        self,
        limit: int,
        unit: str,
        rules: ShareRules | None = None,
        *,
        cost: "tuple[Budget, int] | None" = None,
        of_identity: Callable[[OwnLimits], int | None] | None = None,
        of_container: Callable[[ContainerLimits], int | None] | None = None,
        retry_after: float | None = None,
        code: str = "GS_TOO_MANY",
    ) -> None:
        """Makes a budget that is not in use.

        Args:
            limit: The limit.
            unit: The unit for messages, e.g. "bytes of tensor memory".
            rules: How much of it an identity or a container may hold; None for a budget without shares.
            cost: Another budget with the same rules, and what each unit costs there.
            of_identity: Picks the limit from an identity's own limits; None if they have none.
            of_container: Picks the limit from a container's limits; None if they have none.
            retry_after: Seconds after which a refused owner may try again; None if waiting does not help.
            code: The code of the error when nothing is left for anybody.
        """
        self.limit = limit
        self.used = 0
        self.used_for = dict.fromkeys(Purpose, 0)
        self.unit = unit
        # Identities are never removed: the access file names all of them. Clients choose the names of containers.
        self.identities: dict[str, Share] = {}
        self.containers: WeakValueDictionary[str, Share] = WeakValueDictionary()
        self.spare: list[Callable[[int], None]] = []
        self.rules = rules
        self.retry_after = retry_after
        self._code = code
        self._cost = cost
        self._of_identity = of_identity
        self._of_container = of_container

    def reserve(
        self,
        amount: int = 0,
        *,
        owner: Identity = ANONYMOUS,
        container: str | None = None,
        purpose: Purpose | None = None,
    ) -> "Reservation":
        """Reserves `amount`, which may grow and shrink later, and counts for its owner and its container, too.

        Raises:
            ResourceExhaustedError: That much is not left, or they may not hold it.
        """
        reservation = Reservation(self, () if self.rules is None else self._owners(owner, container), purpose)
        if amount:
            reservation.grow(amount)
        return reservation

    def held_by(self, name: str) -> int:
        """Returns the amount that an identity holds."""
        share = self.identities.get(name)
        return 0 if share is None else share.held

    def held_in(self, container: str) -> int:
        """Returns the amount that is reserved in a container."""
        share = self.containers.get(container)
        return 0 if share is None else share.held

    @property
    def reserved(self) -> int:
        """The part reserved for identities that hold no more than this."""
        return 0 if self.rules is None else int(self.limit * self.rules.reserved)

    def missing(self, owner: Identity, amount: int) -> tuple[int, int]:
        """Returns how much must be freed before `owner` may take `amount`: by the owner, and in total."""
        held = self.held_by(owner.name)
        limit = self.own_limit(owner.name, is_container=False) if owner.name else None
        own = 0 if limit is None else max(held + amount - limit, 0)
        reserved = 0 if not owner.name or held + amount <= self.reserved else self.reserved
        return own, max(own, self.used + amount - (self.limit - reserved))

    def own_limit(self, name: str, *, is_container: bool) -> int | None:
        """Returns the limit of one identity or container, None if it has none."""
        if self.rules is None:
            return None
        if is_container:
            limits_of = self.rules.of_container
            return None if self._of_container is None or limits_of is None else self._of_container(limits_of(name))
        return None if self._of_identity is None else self._of_identity(self.rules.of_identity(name))

    def check(self, amount: int, owners: "Iterable[Share]") -> None:
        """Checks that `amount` is left, and that the owners may hold it. An amount of 0 is always allowed.

        Raises:
            ResourceExhaustedError: It is not, or they may not.
        """
        if amount <= 0:
            return
        for owner in owners:
            owner.check(amount)
        for give_back in self.spare:
            if self.used + amount > self.limit:
                give_back(self.used + amount - self.limit)
        if self.used + amount > self.limit:
            raise ResourceExhaustedError(
                f"too many {self.unit}: {amount} asked for, {self.used} in use, {self.limit} allowed",
                code=self._code,
            )
        if self._cost is not None:
            budget, each = self._cost
            budget.check(each * amount, map(_IN_COST, owners))

    def count(self, amount: int, owners: "Iterable[Share]", purpose: Purpose | None) -> None:
        """Adds to the amounts in use, without checking the limits. For `Reservation`."""
        self.used += amount
        if purpose is not None:
            self.used_for[purpose] += amount
        for owner in owners:
            owner.held += amount
        if self._cost is not None:
            budget, each = self._cost
            budget.count(each * amount, map(_IN_COST, owners), None)

    def _owners(self, owner: Identity, container: str | None) -> "tuple[Share, ...]":
        name = owner.name if self.rules is not None and self.rules.has_identities else ""
        owners = []
        if name:
            owners.append(self.identities.get(name) or self._new_share(name, is_container=False))
        if container is not None:
            owners.append(self.containers.get(container) or self._new_share(container, is_container=True))
        return tuple(owners)

    def _new_share(self, name: str, *, is_container: bool) -> "Share":
        in_cost = None
        if self._cost is not None:
            budget = self._cost[0]
            known = budget.containers if is_container else budget.identities
            in_cost = known.get(name) or budget._new_share(name, is_container=is_container)
        share = Share(self, name, in_cost, is_container=is_container)
        if is_container:
            self.containers[name] = share
        else:
            self.identities[name] = share
        return share


class Share:
    """The amount of a budget that one identity or container holds.

    Attributes:
        held: The amount.
        in_cost: The share of the same owner in the budget that each unit costs something in; None if there is none.
    """

    __slots__ = ("__weakref__", "_budget", "_is_container", "_name", "held", "in_cost")

    def __init__(self, budget: Budget, name: str, in_cost: "Share | None", *, is_container: bool) -> None:
        self.held = 0
        self.in_cost = in_cost
        self._budget = budget
        self._name = name
        self._is_container = is_container

    def check(self, amount: int, counted: int = 0) -> None:
        """Checks that the owner may hold `amount` more, of which the budget counts `counted` as used already.

        Raises:
            ResourceExhaustedError: The owner may not.
        """
        budget, rules, held = self._budget, self._budget.rules, self.held
        if amount <= 0 or rules is None or not rules.are_in_force:
            return
        own = budget.own_limit(self._name, is_container=self._is_container)
        is_above_own = own is not None and held + amount > own
        reserved = 0 if self._is_container else budget.reserved
        is_scarce = not self._is_container and budget.used + amount - counted > budget.limit - reserved
        if not is_above_own and not (is_scarce and held + amount > reserved):
            return
        where = f"in the container {quoted(self._name)}" if self._is_container else f"of {self._name!r}"
        asked = f"too many {budget.unit} {where}: {amount} asked for, {held} in use"
        if is_above_own:
            raise ResourceExhaustedError(f"{asked}, {own} allowed", retry_after=budget.retry_after, code=_QUOTA)
        raise ResourceExhaustedError(
            f"{asked}; {budget.used} of {budget.limit} are in use altogether, and the last {reserved} are reserved "
            "for identities that use no more than that",
            retry_after=budget.retry_after,
            code=_QUOTA,
        )


_QUOTA = "GS_QUOTA"
_IN_COST = attrgetter("in_cost")


class Reservation:
    """An amount of a budget that one holder has, and that grows and shrinks. At the end of a block it is closed.

    Attributes:
        budget: The budget.
        owners: The shares in which it counts, too.
        purpose: Its purpose, if the budget distinguishes any.
        used: The amount.
    """

    __slots__ = ("_expected", "budget", "owners", "purpose", "used")

    def __init__(
        self, budget: Budget, owners: tuple[Share, ...] = (), purpose: Purpose | None = None, used: int = 0
    ) -> None:
        self.budget = budget
        self.owners = owners
        self.purpose = purpose
        self.used = used
        self._expected: list[tuple[Share, int]] | None = None

    def __enter__(self) -> Self:
        """Returns the reservation."""
        return self

    def __exit__(self, *_: object) -> None:
        """Gives everything back."""
        self.settle(0)

    def check(self, amount: int) -> None:
        """Checks that the reservation may grow by `amount`.

        Raises:
            ResourceExhaustedError: It may not.
        """
        self.budget.check(amount, self.owners)

    def grow(self, amount: int) -> None:
        """Takes `amount` more.

        Raises:
            ResourceExhaustedError: That much is not left; nothing was taken.
        """
        self.budget.check(amount, self.owners)
        self.budget.count(amount, self.owners, self.purpose)
        self.used += amount

    def settle(self, amount: int) -> None:
        """Sets the amount without checking the limit, for existing memory that changes hands."""
        if self._expected is not None:
            for owner, num in self._expected:
                owner.held -= num
            self._expected = None
        if amount != self.used:
            self.budget.count(amount - self.used, self.owners, self.purpose)
            self.used = amount

    def another(self, amount: int = 0) -> "Reservation":
        """Returns a new reservation of the same holder.

        Raises:
            ResourceExhaustedError: `amount` is not left.
        """
        other = Reservation(self.budget, self.owners, self.purpose)
        if amount:
            other.grow(amount)
        return other

    def split(self, amount: int) -> "Reservation":
        """Moves `amount` to a new reservation, and returns it."""
        self.used -= amount
        return Reservation(self.budget, self.owners, self.purpose, amount)

    def take_over(self, amount: int, giver: "Reservation") -> None:
        """Takes `amount` more: first what another holder has reserved, then the rest from the budget.

        Only a giver of the same budget can hand anything over; others keep what they have.

        Raises:
            ResourceExhaustedError: The rest is not left, or the owners may not hold it; nothing has changed.
        """
        given = min(giver.used, amount) if giver.budget is self.budget else 0
        self._ask_owners(amount, (giver,))
        self.budget.check(amount - given, ())
        giver.settle(giver.used - given)
        self.budget.count(amount, self.owners, self.purpose)
        self.used += amount

    def expect(self, amount: int, givers: "Iterable[Reservation]" = ()) -> None:
        """Reserves `amount` in the owners' shares alone until `settle`, for memory that givers will hand over.

        Raises:
            ResourceExhaustedError: They may not hold it; nothing has changed.
        """
        asked = self._ask_owners(amount, givers)
        for owner, num in asked:
            owner.held += num
        self._expected = [*(self._expected or ()), *asked]

    def _ask_owners(self, amount: int, givers: "Iterable[Reservation]") -> list[tuple[Share, int]]:
        """Checks that the owners may hold an amount that givers hand over; returns how much is new to each.

        Raises:
            ResourceExhaustedError: They may not.
        """
        if not self.owners:
            return []
        givers = [each for each in givers if each.budget is self.budget]
        new = amount - min(amount, sum([each.used for each in givers]))
        asked = []
        for owner in self.owners:
            own = sum([each.used for each in givers if owner in each.owners])
            missing = amount - min(amount, own)
            owner.check(missing, counted=max(missing - new, 0))
            asked.append((owner, missing))
        return asked
