"""The data of a run whose parameters the server holds: what has counted follows the rounds that led to a version."""

import logging
import time
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from gradserve.accumulators import GradientAccumulator
from gradserve.client import Client
from gradserve.data import Batches
from gradserve.parameter_records import Version
from gradserve.parameters import Parameters
from gradserve.results import Outcome
from gradserve.training.agreement import DAY_SECONDS, NEVER_STALE
from gradserve.training.state import TEXT, as_text, of_text
from gradserve_protocol.errors import AbortedError, GradserveError, OutOfRangeError

_IDLE_SECONDS = 30 * DAY_SECONDS
_PAUSE_SECONDS = 0.1
_NUM_PAUSES = 100
"""The pauses in which another worker may write down what has counted: it does so right after it has a version."""
_log = logging.getLogger(__name__)


class SharedData:
    """The samples of one worker, in step with the version that it has.

    All workers compute from the records of the same rounds what has counted. One that joins needs a state to begin
    with: the newest average of accumulator NAME/INCARNATION/data, where the first worker of each round, by id, writes
    down what has counted after it. From there it goes on by the records.
    """

    def __init__(
        self, data: Batches[Any], client: Client, worker_id: str, container: str, durability: str | None
    ) -> None:
        """Takes the samples; `begin` finds out which of them have counted.

        Args:
            data: The samples.
            client: The client.
            worker_id: The worker's id.
            container: The namespace of the parameters.
            durability: Their durability.
        """
        self._data = data
        self._worker_id = worker_id
        self._begin_data = partial(data.begin, client, worker_id=worker_id, container=container, durability=durability)
        self._find = partial(
            client.gradient_accumulator,
            {"text": TEXT},
            container=container,
            durability=durability,
            idle_lease=_IDLE_SECONDS,
            device="cpu",
            sharded=False,
        )
        self._states: GradientAccumulator | None = None

    def begin(self, parameters: Parameters, read: Callable[[], Version]) -> Version:
        """Finds out what has counted; also of a run that a server has lost, and that begins again.

        Args:
            parameters: The parameters of the run.
            read: Returns their newest version.

        Returns:
            The version from which to go on.

        Raises:
            AbortedError: The server does not know what has counted.
            GradserveError: The server cannot be reached, or refuses.
        """
        run = f"{parameters.name}/{parameters.info().incarnation}"
        states = self._find(shared_name=f"{run}/data")
        state = _newest(states)  # before the version, so that it is not the newer one
        version = read()
        for _ in range(_NUM_PAUSES):
            if state is not None:
                break
            state = self._first(states, version)
            version = read()
        if state is None:
            raise _unknown(parameters.name, version.step)
        if state != self._data.state_dict():
            self._data.load_state_dict(state)
        self._begin_data(run)
        self._states = states
        return self.follow(parameters, version, read)

    def use(self) -> None:
        """Notes that the update with the samples that were taken is sent.

        Raises:
            InvalidArgumentError: They are not as many as an update has.
        """
        self._data.use()

    def follow(self, parameters: Parameters, version: Version, read: Callable[[], Version]) -> Version:
        """Counts the samples of the rounds that led to a version.

        Args:
            parameters: The parameters of the run.
            version: The version that comes next for this worker.
            read: Returns the newest version.

        Returns:
            That version; or a newer one, if records of the rounds are no longer kept.

        Raises:
            AbortedError: The run was set back, or the records are gone. Nothing has changed.
            GradserveError: The server cannot be reached. Nothing has changed.
        """
        for _ in range(_NUM_PAUSES):
            if self._follow(parameters, version.step):
                return version
            if not version.num_updates:  # it was loaded
                break
            time.sleep(_PAUSE_SECONDS)
            version = read()
        raise _unknown(parameters.name, version.step)

    def _follow(self, parameters: Parameters, step: int) -> bool:
        """Follows the rounds up to a step; returns False if it is not known who was in them."""
        assert self._states is not None
        if step < self._data.step:
            raise AbortedError(
                f"the run {parameters.name!r} is at step {step}, but `data` are at step {self._data.step} already: "
                "the parameters were set back. Start all workers again, with another name",
                field="data",
                code="GS_RUN_SET_BACK",
            )
        rounds = _rounds(parameters, self._data.step, step)
        if rounds is None:
            state = _newest(self._states)
            if state is None or not self._data.step < state["step"] <= step:
                return False
            rounds = _rounds(parameters, state["step"], step)
            if rounds is None:
                return False
            self._data.load_state_dict(state)
        self._data.advance_all(rounds)
        if rounds and self._worker_id == min(rounds[-1], default=""):
            self._write()
        return True

    def _write(self) -> None:
        """Writes down what has counted, for workers that join; they do without if it fails."""
        assert self._states is not None
        text = {"text": as_text(self._data.state_dict())}
        try:
            self._states.push_pull(text, 1, NEVER_STALE, worker_id=self._worker_id, one_per_worker=False, copy=False)
        except GradserveError as error:
            _log.warning("what has counted of `data` at step %d could not be written down: %s", self._data.step, error)

    def _first(self, states: GradientAccumulator, version: Version) -> Any:
        """Returns the state of the first worker, which may be this one; None if it must be another that has the step.

        A new run may begin with the state of any step: what an earlier run has counted.
        """
        if version.step and version.step != self._data.step:
            time.sleep(_PAUSE_SECONDS)
            return _newest(states)
        self._data.step = version.step
        own = self._data.state_dict()
        result = states.push_pull({"text": as_text(own)}, 1, worker_id=self._worker_id, on_stale="return")
        return own if result.outcome is Outcome.ACCEPTED else _newest(states)


def _newest(states: GradientAccumulator) -> Any:
    """Returns the state that was written down last, None if there is none."""
    for _ in range(_NUM_PAUSES):
        kept = states.info().kept_steps
        if not kept:
            return None
        try:
            return of_text(states.read_average(max(kept))["text"])
        except OutOfRangeError:  # replaced since
            continue
    return None


def _rounds(parameters: Parameters, since: int, until: int) -> list[Collection[str]] | None:
    """Returns the workers of each round after a step, up to another one; None if not all records are kept."""
    if since == until:
        return []
    records = [each for each in parameters.rounds(since) if each.step <= until]
    if [each.step for each in records] != [*range(since + 1, until + 1)]:
        return None
    return [{update.worker_id for update in each.updates if update.worker_id} for each in records]


def _unknown(name: str, step: int) -> AbortedError:
    return AbortedError(
        f"the server does not know which samples have counted in run {name!r} before step {step}: other values were "
        "loaded into its parameters, or it has lost the records of its rounds. Go on under another name, with the "
        "samples of a checkpoint (data.load_state_dict)",
        field="data",
    )
