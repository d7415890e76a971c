"""A fragment: components that are synchronized together, and the update that is on its way."""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from numpy.typing import NDArray

from gradserve.conversion.plain import as_number
from gradserve.parameter_records import PushPull, Version
from gradserve.parameters import Parameters
from gradserve.results import Outcome
from gradserve.training.diloco.plan import Arrays, Local, Plan, Work
from gradserve.training.shared_data import SharedData
from gradserve_protocol.argument import Argument
from gradserve_protocol.errors import (
    DeadlineExceededError,
    GradserveError,
    LostError,
    ResourceExhaustedError,
    UnavailableError,
)

_PASSING = (DeadlineExceededError, UnavailableError, ResourceExhaustedError)
"""The errors after which training goes on: the next synchronization may succeed."""
_log = logging.getLogger(__name__)


@dataclass
class Update:
    """An update from when it is taken until it is known what became of it.

    Attributes:
        delta: The local values minus those of its base.
        base: The version from which it was computed.
        work: The work in it.
        weight: Its weight.
        metrics: The means of what was reported since the update before it.
        request_id: The id of all attempts to push it.
        has_failed: Whether one of them has failed, or was interrupted.
        pushed: What became of it, once that is known.
    """

    delta: Arrays
    base: Version
    work: Work
    weight: float
    metrics: Mapping[str, float]
    request_id: int
    has_failed: bool = False
    pushed: PushPull | None = None


class Fragment:
    """Components that are synchronized together: parameters on the server, and the version last loaded of them."""

    def __init__(
        self,
        find: Callable[[Any], Parameters],
        values: Arrays,
        plan: Plan,
        to_framework: Callable[[NDArray[Any]], Any],
        new_request_id: Callable[[], int],
        data: SharedData | None = None,
    ) -> None:
        """Finds or creates the parameters.

        Args:
            find: Finds parameters, or creates them with these values.
            values: The initial values.
            plan: The rules by which the fragment is synchronized.
            to_framework: Returns an array of a version as the framework's, in the same memory.
            new_request_id: Returns the id of a new call.
            data: The samples of the worker, if the run shares them out.
        """
        self.names = tuple(values)
        self._plan = plan
        self._data = data
        self.parameters = find(values)
        self.base = self._begun(self.parameters)
        self.work = Work()
        self._reported: dict[str, list[float]] = {}
        self._find = find
        self._to_framework = to_framework
        self._new_request_id = new_request_id
        self._update: Update | None = None

    def values(self, version: Version | None = None) -> dict[str, Any]:
        """Returns the values of a version, by default of the one last loaded. They must not be changed."""
        return {name: self._to_framework((version or self.base)[name]) for name in self.names}

    def report(self, metrics: Mapping[str, float]) -> None:
        """Notes what was measured in a step, for the next update."""
        for name, number in metrics.items():
            self._reported.setdefault(name, []).append(as_number(number, Argument(name)))

    def take(self, local: Local) -> Update:
        """Takes what has changed since the last version; or an earlier update of which nothing is known, once more.

        The same update again rather than a longer one: the server may have counted it already, and then the rest must
        not count twice.
        """
        if self._data is not None:
            self._data.use()
        if self._update is None:
            weight, own, base = self._plan.weight_of(self.work), local(self.names), self.values()
            delta = {name: own[name] - base[name] for name in self.names}
            metrics = {name: math.fsum(numbers) / len(numbers) for name, numbers in self._reported.items()}
            self._reported = {}
            self._update = Update(delta, self.base, self.work, weight, metrics, self._new_request_id())
        return self._update

    def push(self, update: Update, worker_id: str, timeout: float | None) -> PushPull | GradserveError:
        """Pushes an update, and waits for the end of its round; returns the error if the next attempt may succeed.

        Raises:
            GradserveError: The error, if no later attempt will succeed.
        """
        try:
            # Once only: if what follows fails, the next attempt must not add an update that has counted.
            pulled = update.pushed = update.pushed or self.parameters.push_pull(
                update.delta,
                update.base,
                weight=update.weight,
                worker_id=worker_id,
                metrics=update.metrics or None,
                timeout=timeout,
                request_id=update.request_id,
                copy=False,
                codec=self._plan.codec,
                codec_down=self._plan.codec_down,
            )
            # The round of an update that is sent again may have ended long ago.
            version = self._newest() if update.has_failed else pulled.version
            if self._data is not None:
                version = self._data.follow(self.parameters, version, self._newest)
            return replace(pulled, version=version)
        except (*_PASSING, LostError) as error:
            return error

    def load(self, pulled: PushPull, local: Local) -> dict[str, Any]:
        """Takes over the version of a round; returns the values to go on from."""
        assert self._update is not None
        update, alpha = self._update, self._plan.alpha
        own: Arrays = local(self.names) if update.has_failed or alpha else {}
        values = common = self.values(pulled.version)
        since = self.work.minus(update.work)
        counts = pulled.outcome is Outcome.ACCEPTED
        work = Work()
        if update.has_failed:  # what was done since, and all that did not count, is in the next update
            before = self.values(update.base)
            kept = {name: own[name] - before[name] for name in self.names}
            if counts:
                kept = {name: kept[name] - update.delta[name] for name in self.names}
            work = since if counts else self.work
            values = {name: common[name] + kept[name] for name in self.names}
        elif not counts:
            _log.warning("an update of %s was dropped: %s", self.parameters.name, pulled.outcome.name)
        elif alpha:
            work = since
            values = {name: alpha * own[name] + (1 - alpha) * common[name] for name in self.names}
        self._update, self.base, self.work = None, pulled.version, work
        return values

    def fail(self, error: GradserveError, local: Local) -> dict[str, Any]:
        """Goes on after a failed attempt; returns new local values, if they change."""
        assert self._update is not None
        if isinstance(error, LostError):
            try:
                return self._begin_again(local)
            except _PASSING as passing:
                error = passing
        if self._plan.resets:
            self._update, self.work = None, Work()
            return self.values()
        self._update.has_failed = True
        return {}

    def forget_update(self) -> None:
        """Forgets an update that the server has refused: the next one is of the values that there are then."""
        self._update = None

    def _begin_again(self, local: Local) -> dict[str, Any]:
        """Gives the version last loaded to a server that has lost its state; keeps what was done since.

        Not with data: the samples are given out again.
        """
        before, own = self.values(), local(self.names)
        parameters = self._find(self.base)
        base = self._begun(parameters)
        self.parameters, self.base, self._update = parameters, base, None
        common = self.values()
        if self._data is not None:
            self.work = Work()
            return common
        return {name: common[name] + (own[name] - before[name]) for name in self.names}

    def _begun(self, parameters: Parameters) -> Version:
        """Returns the version of parameters from which to go on."""
        if self._data is None:
            return self._read(parameters)
        return self._data.begin(parameters, lambda: self._read(parameters))

    def _newest(self) -> Version:
        return self._read(self.parameters)

    def _read(self, parameters: Parameters) -> Version:
        return parameters.read(copy=False, codec=self._plan.codec_down)
