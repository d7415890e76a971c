"""One worker's part in a training run."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal, Self

from gradserve.accumulators import GradientAccumulator
from gradserve.client import Client
from gradserve.conversion.plain import as_choice, as_integer
from gradserve.data import Batches
from gradserve.errors import (
    AbortedError,
    AlreadyExistsError,
    GradserveError,
    InvalidArgumentError,
    OutOfRangeError,
)
from gradserve.results import ArrayLike, Average, DenseSpec, Outcome, PushPullResult
from gradserve.training.agreement import Compared, WeightsCheck, checked_settings
from gradserve.training.joining import ATTEMPTS, GONE, Attendant, Received
from gradserve.training.rounds import PRESENCE, DropLog, Member, WaitLog, presence_of, presence_spec, present_names
from gradserve.training.run import Advance, Run
from gradserve.training.state import DATA, Carried, State
from gradserve.workers import new_worker_id, with_all_patience
from gradserve_protocol.argument import Argument

_log = logging.getLogger(__name__)

_NUM_REQUIRED = Argument("num_required")


class Worker:
    """One worker's part in a training run: its gradients go into rounds, averages come back, and newcomers are let in.

    All workers begin with the same parameters and apply the same averages in the same order: so they have equal
    parameters at equal steps. A worker whose gradient comes too late for its round applies what the others did.

    Use it from one thread, in a `with` block or with `close`.

    Attributes:
        worker_id: The worker's id, unique in the run.
        step: The step of the accumulator to which this worker's parameters belong.
    """

    def __init__(
        self,
        client: Client,
        parameters: Mapping[str, ArrayLike | DenseSpec],
        *,
        name: str,
        num_required: int,
        worker_id: str | None = None,
        container: str = "",
        timeout: float | None = None,
        keep_averages: int = 4,
        deterministic: bool = False,
        missing: Literal["error", "zeros"] = "error",
        device: str | None = None,
        refuse_non_finite: bool = True,
        durability: str | None = None,
        idle_lease: float | None = None,
        settings: Mapping[str, Mapping[str, str]] | None = None,
        if_exists: Literal["join", "new", "error"] = "join",
        compare_every: int | None = None,
        compared: Compared | None = None,
        data: Batches[Any] | None = None,
    ) -> None:
        """Finds the accumulator of a training run, or makes it. Sends no gradient and changes no step.

        Args:
            client: The client, which stays open for at least as long.
            parameters: The parameters by name, or what has their dtypes and shapes. The same for all workers.
            name: The name of the training run: all workers with the same name and container train together.
            num_required: The number of gradients that end a round: the number of workers, or fewer if some are backups,
                or may die. The same for all workers.
            worker_id: An id that no other worker of the run has. None: that of GRADSERVE_WORKER_ID, or one made of
                host, process and a random number.
            container: The namespace of the name.
            timeout: Seconds to wait for a round, or for the state of another worker; and for a server that is gone,
                unless GRADSERVE_RESTART_PATIENCE is set. None: the client's timeout.
            keep_averages: The number of past rounds whose averages the server keeps for late workers. Each takes as
                much memory as the parameters. A worker that is later gets the state of another.
            deterministic: Whether the same gradients give the same bits in whatever order they arrive.
            missing: What to do with a parameter without a gradient. "error": raise InvalidArgumentError. "zeros": count
                zeros for it; if no worker of a round had a gradient of it, the average does not have it either, so that
                the optimizer leaves it alone. The same for all workers.
            device: Where the server sums, as in `Client.gradient_accumulator`.
            refuse_non_finite: Whether gradients with infinities or NaN are refused, with an InvalidArgumentError that
                names the parameter. Otherwise they reach the parameters of all workers. The same for all workers.
            durability: What the server keeps of the run on its disk, as in `Client.gradient_accumulator`. None: what
                the server was started with.
            idle_lease: Seconds after its last use by a worker at which the run is deleted. None: never.
            if_exists: What `begin` does if there is a run of this name that has taken steps. "join": take the state of
                one of its workers, or what the last of them has left. "new": the same if any of its workers is there;
                otherwise delete it and start over. "error": raise AlreadyExistsError.
            compare_every: Compare the parameters of all workers, bit by bit, at every step that this divides: a digest
                of them travels with the gradient, and the server compares. A worker whose parameters differ from those
                of most gets an AbortedError out of `exchange`, and the others log it. None: every 10 steps, or up to
                1,000 if the parameters are large, and a difference is only logged. 0: never.
            compared: Returns this worker's parameters, as arrays in the memory of the host by name; None if they are
                not at hand. None: they are never compared.
            settings: What else all workers must have been started with: texts by name, by kind of worker, such as
                {"numpy": {"learning rate": "0.1"}}. `begin` compares them with those of the first worker of that kind.
            data: The batches of this worker, made by `gradserve.data`, if the run shares them out. They follow its
                rounds, and what has counted of them is part of the state that workers take over. The same for all.

        Raises:
            AlreadyExistsError: The run has other parameters, or another `num_required`: the message says which.
            InvalidArgumentError: An argument is not valid.
        """
        if not name:
            raise InvalidArgumentError("expected a name for the training run, got ''", field="name")
        self.worker_id = new_worker_id() if worker_id is None else worker_id
        self.step = 0
        self._num_required = as_integer(num_required, _NUM_REQUIRED)
        if self._num_required < 1:
            raise _NUM_REQUIRED.error("a positive number of gradients", num_required)
        self._timeout = timeout
        self._member = Member(self.worker_id, self._num_required, timeout)
        self._name = name
        options = {
            "container": container,
            "keep_averages": keep_averages,
            "deterministic": deterministic,
            "missing": missing,
            "device": device,
            "refuse_non_finite": refuse_non_finite,
            "durability": durability,
            "idle_lease": idle_lease,
            "ends_when_lost": True,
            "agreement": {"num_required": str(self._num_required)},
        }
        self._if_exists = as_choice(if_exists, ("join", "new", "error"), Argument("if_exists"))
        self._parameters = dict(parameters)
        self._names = tuple(self._parameters)
        self._is_partial = missing == "zeros"
        if self._is_partial:
            self._parameters[PRESENCE] = presence_spec(len(self._names))
        self._check = WeightsCheck.of(name, self.worker_id, compare_every, compared, list(parameters.values()))
        self._digest: bytes | None = None
        agreed = checked_settings(settings or {})
        if data is not None:
            agreed["data"] = data.settings
        self._run = Run(client, name, self.worker_id, self._parameters, options, agreed)
        self._client = client
        self._data = data
        self._container, self._durability = container, durability
        self._attendant: Attendant | None = None
        self._members: tuple[str, ...] = ()
        self._waits = WaitLog(name, self.worker_id, self._num_required)
        self._drops = DropLog(name, self.worker_id)
        self._has_seen_steps = False
        """True if the run had taken steps when this worker asked for a state to begin with."""
        self._is_apart = False
        """True if this worker needs the state of another one, as a restart has lost the averages that lead to it."""
        self._begun_with: State | None = None
        """The state with which others have begun after such a restart, at step 0."""

    def compares_at(self, step: int) -> bool:
        """Returns True if parameters are compared with those of the other workers at a step."""
        return self._check is not None and self._check.compares_at(step)

    @property
    def accumulator(self) -> GradientAccumulator:
        """The accumulator of the gradients."""
        return self._run.accumulator

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        try:
            if error is None:
                self.leave()
        finally:
            self.close()

    def leave(self) -> None:
        """Sends this worker's state, unless there is a newer one, so that late workers get to it when all have left.

        A `with` block that ends without an error does so. As only others need it, a state that cannot be sent, or a
        server that is gone, is no error here, but a warning in the log.
        """
        if self._attendant is None:
            return
        try:
            if self._run.joining.newest_step() < self.step:
                state = self._state()
                if state is not None:
                    self._run.joining.answer(Carried.of(state), self.step)
        except Exception as error:
            _log.warning(
                "worker %r has left training run %r at step %d without sending its state to late workers: %s",
                self.worker_id,
                self._name,
                self.step,
                error,
                exc_info=not isinstance(error, GradserveError),
            )

    def close(self) -> None:
        """Ends this worker's part in the run; the others go on, and the accumulator stays. Can be called again."""
        if self._attendant is not None:
            self._attendant.close()
            self._attendant = None

    @with_all_patience()
    def begin(self, state: Callable[[], State | None], *, start_step: int | None = None) -> State | None:
        """Finds out where to begin; the worker then has parameters of step `self.step`.

        Nobody has trained yet: the parameters of the first worker that comes become those of all. Others are training:
        waits until one of them sends its state.

        Args:
            state: Returns the state of this worker at this moment; its tensors must be the same ones for all workers.
                Also called in `exchange`, in another thread, for workers that join later; there None says that the
                state is not at hand, and a joiner waits for the next step, or for another worker.
            start_step: The step of parameters that are already there, from a checkpoint: nothing is loaded. If the
                others are further, the first `exchange` brings what was missed. "error" as `if_exists` does
                not apply.

        Returns:
            The state to load, or None if this worker's own state stands.

        Raises:
            InvalidArgumentError: `start_step` is negative, or not the step of `data`; or the state cannot travel.
            AlreadyExistsError: There is such a run and `if_exists` is "error"; or the states of the workers do not have
                the same tensors; or they have other `settings` or `data`: the message has both values.
            DeadlineExceededError: Others have trained, and none of them has answered in time.
        """
        if self._attendant is not None:
            raise InvalidArgumentError("expected one call of begin(), got another", field="state")
        own = self._with_data(state)
        loaded, how = self._begun(own, start_step)
        loaded = self._without_data(loaded)
        self._begin_data(is_at_step=start_step is not None)
        _log.info(
            "worker %r is in training run %r at step %d and %s; a round needs %d gradients",
            self.worker_id,
            self._name,
            self.step,
            how,
            self._num_required,
        )
        self._state = own
        self._attendant = Attendant(
            self._run.joining, self.worker_id, own, look=lambda: self._waits.look(self.accumulator)
        )
        return loaded

    def _begun(self, state: Callable[[], State | None], start_step: int | None) -> tuple[State | None, str]:
        """Begins, despite restarts of the server; returns the state to load, or None, and in words how."""
        for _ in range(ATTEMPTS):
            try:
                return self._begun_once(state, start_step)
            except GONE as error:
                if not self._run.note_loss(error):
                    raise
                self._run.find()
        return self._begun_once(state, start_step)

    def _begun_once(self, state: Callable[[], State | None], start_step: int | None) -> tuple[State | None, str]:
        is_new = self._if_exists == "new"
        reached = self._run.begin_anew() if is_new else self.accumulator.info().global_step
        self._run.agree_on_settings()
        loaded: State | None = None
        how = "begins it"
        if start_step is not None:
            self._begin_at(start_step, reached)
            how = f"goes on from a checkpoint of step {start_step}"
        elif not reached and not self._has_seen_steps:
            own = state()
            if own is None:
                raise InvalidArgumentError("expected the state that this worker begins with, got None", field="state")
            loaded = self._run.agree_on_initial_state(own)
        elif self._if_exists == "error":
            raise AlreadyExistsError(
                f"training run {self._name!r} is at step {reached}, but this worker would start at step 0. To take the "
                'state of its workers, pass if_exists="join"; to start over, if_exists="new" or another name; to go on '
                "from a checkpoint, its step as start_step",
                field="if_exists",
                code="GS_RUN_EXISTS",
            )
        else:
            # If a restart loses the run now, the training workers create it again, and still have the state to send.
            self._has_seen_steps = True
            _log.info("worker %r asks for the state of training run %r at step %d", self.worker_id, self._name, reached)
            loaded = self._join(reached).state
            how = "joins it with the state of another worker"
        return loaded, how

    @with_all_patience()
    def exchange(self, gradients: Mapping[str, ArrayLike | None], weight: float = 1.0) -> Advance:
        """Sends the gradient of this worker's parameters, waits until its round ends, and returns what to apply.

        Args:
            gradients: The gradient of each parameter, by name: arrays of any library. With `missing="zeros"`, those
                without a gradient are None or left out.
            weight: The weight of the gradient in the mean: the size of the batch, if batches differ.

        Returns:
            The averages to apply. Their arrays are read-only, and may be memory that the server shares with all workers
            of this machine.

        Raises:
            InvalidArgumentError: A gradient is missing, does not have the parameter's shape, or has infinities or NaN.
                It does not count: the next `exchange` may bring another one for the same step. Or its batches were not
                taken from `data`.
            AbortedError: The accumulator was deleted, or put back to an earlier step; or this worker's parameters are
                not those of the others (`compare_every`).
            DeadlineExceededError: Too few gradients arrived in time; the message says which workers are missing. The
                gradient counts: the next `exchange` waits for the same round. Or this worker is further behind than
                averages are kept, after a start from an old checkpoint for example, and no other worker has sent its
                state in time; a note says what to do.
            GradserveError: See `GradientAccumulator.push_pull`.
        """
        if self._attendant is None:
            raise InvalidArgumentError("expected begin() before exchange()", field="gradients")
        if self._data is not None:
            self._data.use()
        advance = self._exchanged(gradients, weight)
        advance = replace(advance, state=self._without_data(advance.state))
        if self._data is not None:
            self._data.advance_all([average.worker_ids for average in advance.averages])
        self.step = advance.step
        if advance.averages:
            self._members = advance.averages[-1].worker_ids
        return replace(advance, averages=tuple(map(self._of_those_present, advance.averages)))

    def _exchanged(self, gradients: Mapping[str, ArrayLike | None], weight: float) -> Advance:
        """Does what `exchange` does, despite restarts of the server while this worker catches up with the others."""
        for _ in range(ATTEMPTS):
            try:
                return self._exchanged_once(gradients, weight)
            except GONE as error:
                if not self._run.note_loss(error):
                    raise
        return self._exchanged_once(gradients, weight)

    def _exchanged_once(self, gradients: Mapping[str, ArrayLike | None], weight: float) -> Advance:
        assert self._attendant is not None
        if self._check is not None:
            self._digest = self._check.to_send(self.step)
        result: PushPullResult | None = None
        if self._run.loss is not None or not self._is_apart:
            resting = self._attendant.at_rest(self.step, self._members)
            with resting, self._waits.waiting(self.step, self._members):
                result = self._sent(gradients, weight)
        advance = self._as_the_others() if result is None else self._advance(result)
        if self._check is not None and self._digest is not None and advance.averages and not advance.was_late:
            self._check.look(self.step, advance.averages[-1])
        if result is not None:
            self._drops.note(self.step, result.global_step, was_dropped=advance.was_late)
        return advance

    def _of_those_present(self, average: Average) -> Average:
        """Returns an average of parameters alone, without those of which no worker had a gradient."""
        if not self._is_partial:
            return average
        present = present_names(self._names, average)
        return replace(
            average,
            components={name: each for name, each in average.components.items() if name in present},
            gradients={name: each for name, each in average.gradients.items() if name in present},
        )

    def _sent(self, gradients: Mapping[str, ArrayLike | None], weight: float) -> PushPullResult | None:
        """Sends a gradient; returns None if the run goes on from parameters that this worker does not have."""
        if self._run.loss is None:
            try:
                return self._push_pull(gradients, weight)
            except GONE as error:
                if not self._run.note_loss(error):
                    error.add_note(
                        f"This worker of training run {self._name!r} was at step {self.step}. If the accumulator was "
                        "deleted to start over, start this worker again, too."
                    )
                    raise
        self._find_again()
        return None if self._is_apart else self._push_pull(gradients, weight)

    def _push_pull(self, gradients: Mapping[str, ArrayLike | None], weight: float) -> PushPullResult:
        if self._is_partial:
            present = {name for name in self._names if gradients.get(name) is not None}
            gradients = {**gradients, PRESENCE: presence_of(self._names, present)}
        return self._member.push_pull(self.accumulator, gradients, self.step, weight, digest=self._digest)

    def _find_again(self) -> None:
        """Goes on after a restart of the server, with a new accumulator if it has lost that of the run.

        The worker is then apart if the run does not go on from its parameters: between its step and that of the others
        there are rounds that nobody knows any more.
        """
        assert self._attendant is not None
        loss = self._run.loss
        found = self._run.find_again(self.step, self._state)
        if found is not None:
            base, self._begun_with = found
            self._is_apart = base != self.step or self._begun_with is not None
        _log.warning("training run %r goes on after: %s", self._name, loss)
        if found is not None and base < self.step:
            _log.warning(
                "training run %r goes back from step %d to step %d, with which another worker has begun it again; a "
                "server with a state directory (--state-dir) loses nothing",
                *(self._name, self.step, base),
            )
        if found is not None:
            self._follow_with_data()
        if not self._is_apart:
            self._attendant.use(self._run.joining)

    def _as_the_others(self) -> Advance:
        """Takes the state of another worker after a restart of the server."""
        assert self._attendant is not None
        if self._begun_with is None:
            received = self._join(self.accumulator.info().global_step)
        else:
            received = Received(self._begun_with, 0)
        self._begun_with, self._is_apart = None, False
        self._attendant.use(self._run.joining)
        return Advance((), received.state, True, received.step)

    def _advance(self, result: PushPullResult) -> Advance:
        was_late = result.outcome is Outcome.STALE
        reached = result.global_step if was_late else result.step
        if reached <= self.step:
            raise AbortedError(
                f"training run {self._name!r} went on to step {reached}, but this worker is at step {self.step} "
                "already: the accumulator was set back. Start all workers of the run again, from a checkpoint with "
                "start_step=...",
                code="GS_RUN_SET_BACK",
            )
        try:
            missed = self._member.averages_between(self.accumulator, self.step, result, reached)
        except (AbortedError, OutOfRangeError):
            received = self._join(reached)
            return Advance((), received.state, was_late, received.step)
        return Advance(missed, None, was_late, reached)

    def _with_data(self, state: Callable[[], State | None]) -> Callable[[], State | None]:
        """Returns a function that adds to a state what has counted of the data."""
        data = self._data
        if data is None:
            return state

        def with_data() -> State | None:
            own = state()
            return own and State(own.tensors, {**own.metadata, DATA: data.state_dict()})

        return with_data

    def _without_data(self, state: State | None) -> State | None:
        """Returns a state that was received as its worker gave it; takes over what has counted of the data."""
        if state is None:
            return None
        metadata = dict(state.metadata)
        counted = metadata.pop(DATA, None)
        if (counted is None) is not (self._data is None):
            have, others = ("no `data`", "has") if counted is None else ("`data`", "has none")
            raise AlreadyExistsError(
                f"the other workers of training run {self._name!r} have {have}, and this one {others}: all of a run "
                "need the same; give another run another name",
                field="data",
                code="GS_WORKERS_DIFFER",
            )
        if self._data is not None:
            self._data.load_state_dict(counted)
        return State(state.tensors, metadata)

    def _begin_data(self, *, is_at_step: bool) -> None:
        """Lets the data follow the rounds from here on; `is_at_step` if they come from a checkpoint of this step."""
        if self._data is None:
            return
        if is_at_step and self._data.step != self.step:
            raise InvalidArgumentError(
                f"expected data of step {self.step}, where this worker begins (start_step), got data of step "
                f"{self._data.step}: load_state_dict of the same checkpoint comes before",
                field="data",
            )
        self._data.step = self.step
        self._follow_with_data()

    def _follow_with_data(self) -> None:
        if self._data is not None:
            self._data.begin(
                self._client,
                self._run.id,
                worker_id=self.worker_id,
                container=self._container,
                durability=self._durability,
            )

    def _begin_at(self, start_step: int, reached: int) -> None:
        if start_step < 0:
            raise InvalidArgumentError(f"expected a step that is not negative, got {start_step}", field="start_step")
        if reached < start_step:
            self.accumulator.set_global_step(start_step)
        self.step = start_step

    def _join(self, reached: int) -> Received:
        received = self._run.receive(self._timeout, reached, None if self._attendant is None else self.step)
        self.step = received.step
        return received
