"""The averages that an accumulator keeps: for readers, and for calls that may not have received theirs."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from gradserve_server.accumulators.gradient import Average, HostCopy, Value
from gradserve_server.accumulators.history import AverageHistory
from gradserve_server.accumulators.identity import RequestId
from gradserve_server.accumulators.kept_bytes import KeptBytes
from gradserve_server.accumulators.places.average_copies import AverageCopies
from gradserve_server.accumulators.rounds import Round, Rounds
from gradserve_server.accumulators.sharding.decision import Decision, as_of_now
from gradserve_server.accumulators.undelivered import UndeliveredAverages
from gradserve_server.errors import AbortedError
from gradserve_server.resources.quotas import Account, Quota
from gradserve_server.runtime.timing import Turn


def average_of_current(rounds: Rounds, values: Mapping[str, Value], host_copy: HostCopy | None) -> Average:
    """Returns the average of the round that is about to end, given its values and their copy on the host."""
    members = rounds.members
    return Average(
        values=values,
        step=rounds.next_step,
        round_number=rounds.current.number,
        num_gradients=members.count,
        total_weight=members.total_weight,
        worker_ids=tuple(members.workers),
        host_copy=host_copy,
    )


class KeptAverages:
    """The averages that an accumulator keeps, and their share of the memory.

    Not thread-safe: used on the event loop only.
    """

    def __init__(
        self,
        history: AverageHistory,
        undelivered: UndeliveredAverages,
        kept: KeptBytes,
        memory: Quota,
        copies: AverageCopies,
        expire_at: Callable[[float, "KeptAverages"], None],
        forget: Callable[[Collection[int]], None] = lambda _: None,
        decision: Decision | None = None,
    ) -> None:
        """Takes the parts that keep averages, and the quota of memory.

        Args:
            history: Keeps averages for readers.
            undelivered: Keeps averages for calls that may be sent again.
            kept: Counts the memory of the averages that both keep.
            memory: The quota of bytes.
            copies: Copies averages to other memory.
            expire_at: Schedules a call of `expire` at a time of the clock of `undelivered`.
            forget: Called with the numbers of rounds whose averages are no longer kept.
            decision: Names the gradients of rounds, if the accumulator is sharded.
        """
        self.history = history
        self._undelivered = undelivered
        self._kept = kept
        self._account = Account(memory)
        self._copies = copies
        self._expire_at = expire_at
        self._forget = forget
        self._decision = decision
        self._expiry_asked_for = False

    @property
    def nbytes(self) -> int:
        """The memory of all averages, each counted once."""
        return self._account.used

    def of_current(self, rounds: Rounds, values: Mapping[str, Value]) -> Average:
        """Returns the average of the round that is about to end, which is not kept yet."""
        average = average_of_current(rounds, values, self._copies.host_copy(values))
        return average if self._decision is None else replace(average, parts=self._decision.parts(rounds))

    @property
    def all_kept(self) -> list[Average]:
        """The averages that are kept, for readers and for calls; some of them twice."""
        return [*self.history.all_kept, *self._undelivered.averages]

    def answered(self, average: Average, rounds: Rounds) -> Average:
        """Returns an average as an answer of now: of a sharded accumulator, with what servers may forget."""
        if average.parts is None:
            return average
        return replace(average, parts=as_of_now(average.parts, rounds, self.all_kept))

    def hold(self, average: Average, call: RequestId | None) -> bool:
        """Keeps the average that a call reads until a later call of its client, if servers have yet to compute it.

        Returns:
            False if it is no longer kept: servers may have forgotten it.
        """
        if average.parts is None:
            return True
        number = average.round_number
        if self.history.of_round(number) is None and self._undelivered.get(number) is None:
            return False
        if call is not None:
            self._undelivered.add(average, [call])
            self._settle()
            self._ask_for_expiry()
        return True

    async def keep_again(self, average: Average, answered: Sequence[RequestId]) -> None:
        """Keeps an average that was there before, whose values are on the host.

        Raises:
            ResourceExhaustedError: There is not enough memory.
        """
        values = await self._copies.brought(average.values)
        self.add(replace(average, values=values, host_copy=self._copies.host_copy(values)), answered)

    def add(self, average: Average, answered: Sequence[RequestId]) -> None:
        """Keeps the average of the round that has just ended, for readers and for the calls that it answers."""
        self.history.add(average)
        self._undelivered.add(average, answered)
        self._settle()
        self._ask_for_expiry()

    def of_round(self, ended: Round) -> Average:
        """Returns the average of a round.

        Raises:
            AbortedError: It is no longer kept.
        """
        average = self.history.of_round(ended.number) or self._undelivered.get(ended.number)
        if average is None:
            raise AbortedError(
                f"the round of this request_id ended with step {ended.step}, whose average is no longer kept",
                field="request_id",
            )
        return average

    def acknowledge(self, call: RequestId) -> None:
        """Releases the averages that the client has received, as a later call shows."""
        if self._undelivered.acknowledge(call):
            self._settle()

    def beyond(self, step: int) -> tuple[int, ...]:
        """Returns the numbers of the rounds that led beyond a step, and whose averages are kept."""
        return tuple(sorted({each.round_number for each in self.all_kept if each.step > step}))

    def step_set(self, step: int, abandoned: Collection[int]) -> None:
        """Drops the averages of rounds, and ends the waits for steps that no round can lead to any more.

        An earlier step takes back what came after it: neither readers nor stragglers nor calls that are sent again get
        these averages.
        """
        self.history.drop(abandoned)
        self._undelivered.withdraw(abandoned)
        self.history.step_set(step)
        self._settle()

    def make_room(self) -> bool:
        """Drops the oldest average kept only for calls that may be sent again; returns False if there is none."""
        dropped = self._undelivered.drop_oldest(self.history.rounds)
        self._settle()
        return dropped

    def expire(self, turn: Turn) -> int:
        """Releases averages kept for calls whose lease has ended, in one turn; returns the number of calls."""
        self._expiry_asked_for = False
        count = self._undelivered.expire(turn)
        self._settle()
        self._ask_for_expiry()
        return count

    def close(self, error: Exception) -> None:
        """Ends the waits of readers with an error, and frees the memory. What is on disk stays."""
        self.history.close(error)
        self._undelivered.clear()
        self._kept.take_dropped()
        self._settle()

    def _settle(self) -> None:
        dropped = self._kept.take_dropped()
        if dropped:
            self._forget(dropped)
        self._account.settle(self._kept.total)

    def _ask_for_expiry(self) -> None:
        deadline = self._undelivered.next_deadline
        if deadline is not None and not self._expiry_asked_for:
            self._expiry_asked_for = True
            self._expire_at(deadline, self)
