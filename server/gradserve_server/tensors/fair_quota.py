"""Quotas in which everything counts for an identity, and for a container."""

from collections.abc import Callable, Sequence
from weakref import WeakValueDictionary

from gradserve_server.security.identity import Identity
from gradserve_server.security.own_limits import ContainerLimits, OwnLimits
from gradserve_server.security.shares import ContainerShares, Share, ShareRules, Shares
from gradserve_server.tensors.quotas import Cost, Quota


def _no_limit(_limits: OwnLimits | ContainerLimits) -> None:
    return None


class FairQuota(Quota):
    """A quota of which each identity has a fair share, and containers have limits.

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
        """Takes the limit, what is limited, and the rules.

        Args:
            limit: The limit.
            unit: The unit for messages.
            rules: How much of it an identity or a container may hold.
            each: What each takes of another quota.
            of_identity: Picks the limit of an identity of its own, None for none.
            of_container: Picks the limit of a container, None for none.
            retry_after: Seconds after which somebody who holds too much may try again; None if waiting does not help.
        """
        super().__init__(limit, unit, each=each)
        self.identities = Shares(self, rules, of_identity, retry_after)
        self.containers = ContainerShares(self, rules, of_container, retry_after)
        self._rules = rules
        self._has_identities = rules.has_identities
        # One for all who take for the same identity and container: there can be a million handles.
        self._parts: WeakValueDictionary[tuple[str, str], Quota] = WeakValueDictionary()
        self._parts_without_container: dict[str, Quota] = {}

    @property
    def reserve(self) -> int:
        """The part that is for identities that hold no more than that."""
        return int(self.limit * self._rules.reserved)

    def missing(self, owner: Identity, amount: int) -> tuple[int, int]:
        """Returns how much must be given back before somebody may take `amount`: by the taker, and by all together."""
        own = self.identities.missing(owner.name, amount)
        held = self.identities.held_by(owner.name)
        reserve = 0 if not owner.name or held + amount <= self.reserve else self.reserve
        return own, max(own, self.used + amount - (self.limit - reserve))

    def part(self, owner: Identity, container: str | None = None) -> Quota:
        """Returns the quota for what belongs to an identity, and is in a container: whatever is taken counts for both.

        Args:
            owner: The identity; the anonymous one for nobody.
            container: The container, None for none.
        """
        name = owner.name if self._has_identities else ""
        if container is None:
            return self._part_without_container(name, owner) if name else self
        part = self._parts.get((name, container))
        if part is None:
            part = self._parts[name, container] = self._new_part(name, owner, container)
        return part

    def _part_without_container(self, name: str, owner: Identity) -> Quota:
        part = self._parts_without_container.get(name)
        if part is None:
            part = self._parts_without_container[name] = self._new_part(name, owner, None)
        return part

    def _new_part(self, name: str, owner: Identity, container: str | None) -> Quota:
        owners = [self.identities.named(name)] if name else []
        if container is not None:
            owners.append(self.containers.named(container))
        return _Part(self, owners, None if self._each is None else self._each.part(owner, container))


class _Part(Quota):
    """A quota as its owners take from it.

    Attributes:
        used: What was taken in this way.
    """

    def __init__(self, whole: Quota, owners: Sequence[Share], each: Cost | None) -> None:
        super().__init__(whole.limit, whole.unit, each=each)
        self._whole = whole
        self.owners = owners

    @property
    def whole(self) -> Quota:
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
