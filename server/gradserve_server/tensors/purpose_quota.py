"""A quota of which it is known how much is in use for one purpose."""

from weakref import WeakValueDictionary

from gradserve_server.security.identity import Identity
from gradserve_server.tensors.quotas import Quota


class PurposeQuota(Quota):
    """What is taken of another quota for one purpose.

    Attributes:
        used: How much that is.
    """

    def __init__(self, source: Quota) -> None:
        """Takes the quota from which everything is taken."""
        super().__init__(source.limit, source.unit)
        self.owners = source.owners
        self._source = source
        self._parts: WeakValueDictionary[Quota, _Part] = WeakValueDictionary()

    @property
    def whole(self) -> Quota:
        """See `Quota`."""
        return self._source.whole

    def part(self, owner: Identity, container: str | None = None) -> Quota:
        """See `Quota`."""
        source = self._source.part(owner, container)
        if source is self._source:
            return self
        part = self._parts.get(source)
        if part is None:
            part = self._parts[source] = _Part(source, self)
        return part

    def check(self, amount: int) -> None:
        """See `Quota`."""
        self._source.check(amount)

    def check_left(self, amount: int) -> None:
        """See `Quota`."""
        self._source.check_left(amount)

    def count(self, amount: int) -> None:
        """See `Quota`."""
        self.used += amount
        self._source.change(amount)


class _Part(PurposeQuota):
    """What is taken for the purpose by one identity, or in one container."""

    def __init__(self, source: Quota, of_all: PurposeQuota) -> None:
        super().__init__(source)
        self._of_all = of_all

    def count(self, amount: int) -> None:
        super().count(amount)
        self._of_all.used += amount
