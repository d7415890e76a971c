"""The calls of parameters, as users see them.

The blocking and the asyncio class take their signatures and docstrings from here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, SupportsFloat, TypeVar

from gradserve import codecs, optim
from gradserve.calls.accumulators.contributions import Contribution
from gradserve.calls.exchange import Operation, Progress, Work, check_timeout, tracked
from gradserve.calls.parameters.creation import ParametersCache
from gradserve.calls.parameters.evaluations import EvaluatedSteps, evaluate
from gradserve.calls.parameters.spec import changed_properties
from gradserve.calls.parameters.wire import ParametersWire
from gradserve.codecs import as_codec
from gradserve.conversion.plain import as_flag, as_text
from gradserve.conversion.trees import Tree
from gradserve.parameter_records import (
    UNCHANGED,
    Evaluation,
    ParametersInfo,
    PushPull,
    PushResult,
    ReportResult,
    RoundRecord,
    Unchanged,
    Version,
)
from gradserve.saved.parameters import SavedParameters, as_path, load_parameters, save
from gradserve_protocol.argument import Argument

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class ParametersCalls:
    """Calls of `Parameters`."""

    _wire: ParametersWire
    _cache: ParametersCache
    _timeout: float

    @property
    def name(self) -> str:
        """The name of the parameters on the server."""
        name: str = self._wire.ref.name
        return name

    @property
    def description(self) -> str:
        """Their name and components, on one line."""
        return f"{self._wire.ref.container}/{self._wire.ref.name}: {self._wire.components}"

    def read(
        self,
        step: int | None = None,
        timeout: float | None = None,
        *,
        copy: bool = True,
        codec: codecs.Codec | str | None = None,
        progress: Callable[[int, int], object] | bool | None = None,
    ) -> Operation[Version]:
        """Returns a version: all components as they were at one step. Changes nothing.

        Args:
            step: Its step. None: the newest. A future one is waited for.
            timeout: Seconds to wait for a future step. None: the client's timeout. math.inf: no limit.
            copy: Whether the arrays returned are new. False: they are read-only, and may be memory that a server on the
                same machine shares with all who read the version, which saves copying it.
            codec: How the version travels, of `gradserve.codecs`, or its name: with fewer bytes and some error. None:
                as it is.
            progress: Told how far the transfer is, as by `Client.put`, once it begins.

        Returns:
            The version: a mapping from names to arrays of the components' dtypes, with its step and digest, and as a
            tree (`values`).

        Raises:
            InvalidArgumentError: The codec is for updates only, or a value of the version does not fit into it.
            OutOfRangeError: The version is no longer kept (`keep_versions`).
            DeadlineExceededError: The step was not reached in time.
            AbortedError: The parameters were deleted while the call waited.
            NotFoundError: The parameters were deleted before the call.
            LostError: The server was started again, and has lost the parameters, because their durability is "none".
        """
        packing = as_codec(codec, Argument("codec"), of_version=True)
        read = partial(self._wire.read, step, self._wait(timeout), copy=copy, codec=packing)
        return tracked(progress, self._at_home(read))

    def push(
        self,
        update: Tree,
        local_step: int | Version,
        *,
        weight: float = 1.0,
        worker_id: str | None = None,
        metrics: Mapping[str, SupportsFloat] | None = None,
        request_id: int | None = None,
        codec: codecs.Codec | str | None = None,
        progress: Callable[[int, int], object] | bool | None = None,
    ) -> Operation[PushResult]:
        """Adds an update to the round, or drops it if it is too stale. Never waits for other workers.

        All of its components count, or none; once, even if the client has to send it again.

        Args:
            update: A tree like the one that the parameters were made of, or a dict by component name. With
                update="delta": the worker's parameters minus the version from which it started; with
                update="gradient": the gradient. The leaves are arrays of any library, numbers, or handles. Components
                that are missing or None have no update: they are skipped, as parameters without a gradient are in
                PyTorch.
            local_step: The step of the version from which the update was computed, or that version.
            weight: Its weight in the mean of the round: positive, such as the number of samples.
            worker_id: The sender's id: each worker counts once a round. None: an id for this client and thread, or no
                id if sums are deterministic.
            metrics: What the worker has measured, by name: {"loss": 0.3}. At most 32 numbers, with names of at most 64
                bytes; NaN and infinities are allowed. They count with the update. `rounds()` has them, and their means
                over each round by the weights that counted; so have the status page and Prometheus.
            request_id: The `request_id` of a failed attempt's error, to send the same update again; it still counts
                once. None: a new update.
            codec: How the update travels, of `gradserve.codecs`, or its name: with fewer bytes and some error, which
                these parameters keep below 8 bits, and add to the next update of the worker. None: as it is.
            progress: Told how far the transfer of the update is, as by `Client.put`. An exception from the callback
                before the last call means that the update does not count.

        Returns:
            What became of the update, its staleness, and the weight that counts.

        Raises:
            InvalidArgumentError: A component is unknown or of another shape, a value does not fit into its dtype or is
                not finite, there is no component, `local_step` is in the future, or the weight is not within its
                limits. Nothing has changed.
            ResourceExhaustedError: The server has no room for the update.
            NotFoundError: The parameters were deleted, or a handle's tensor does not exist.
            LostError: The server was started again, and has lost the parameters or updates.
            UnavailableError: The server cannot be reached. It may have counted the update: try again with `request_id`.
        """
        how = Contribution(_step_of(local_step), weight, worker_id, metrics=metrics)
        packing = as_codec(codec, Argument("codec"))
        return tracked(progress, self._at_home(partial(self._wire.push, update, how, request_id, codec=packing)))

    def push_pull(
        self,
        update: Tree,
        local_step: int | Version,
        *,
        weight: float = 1.0,
        worker_id: str | None = None,
        metrics: Mapping[str, SupportsFloat] | None = None,
        timeout: float | None = None,
        request_id: int | None = None,
        copy: bool = True,
        codec: codecs.Codec | str | None = None,
        codec_down: codecs.Codec | str | None = None,
        progress: Callable[[int, int], object] | bool | None = None,
    ) -> Operation[PushPull]:
        """Adds an update to the round, waits for the end of the round, and returns the version that it made.

        A call that gives up waiting leaves its update in the round. Called again, even with another update, it adds
        nothing, says so (`outcome` is ALREADY_COUNTED), and waits for the same round.

        Args:
            update: The update, as in `push`.
            local_step: The step of the version from which the update was computed, or that version.
            weight: Its weight in the mean of the round: positive, such as the number of samples.
            worker_id: The sender's id. None: an id for this client and thread, or no id if sums are deterministic. So
                each thread with a share of the work is a worker; coroutines that share a client need worker ids of
                their own.
            metrics: What the worker has measured, by name, as in `push`.
            timeout: Seconds to wait. None: the client's timeout. math.inf: no limit.
            request_id: The `request_id` of a failed attempt's error, to wait on for the version of that attempt's
                round. None: a new update.
            copy: Whether the arrays returned are new. False: they are read-only, and may be memory that a server on the
                same machine shares with all who read the version, which saves copying it.
            codec: How the update travels; see `push`.
            codec_down: How the version travels; see `read`.
            progress: Told how far the transfer is, as by `Client.put`: first of the update, then, with its size added
                to the total, of the version.

        Returns:
            The version that the round made, and what became of the update. If that was too stale, `outcome` is STALE,
            and the version is the newest one.

        Raises:
            InvalidArgumentError: See `push`.
            DeadlineExceededError: The round did not end in time, or its own deadline passed with too few updates. The
                message says how many there are, which workers are missing, and how to wait on.
            AbortedError: The parameters were deleted while the call waited.
            NotFoundError: The parameters were deleted before the call, or a handle's tensor does not exist.
            LostError: The server was started again, and has lost the parameters or updates.
            UnavailableError: The server cannot be reached. It may have counted the update: try again with `request_id`.
        """
        how = Contribution(_step_of(local_step), weight, worker_id, metrics=metrics)
        push_pull = partial(self._wire.push_pull, update, how, self._wait(timeout), request_id)
        up, down = as_codec(codec, Argument("codec")), as_codec(codec_down, Argument("codec_down"), of_version=True)
        return tracked(progress, self._at_home(partial(push_pull, copy=copy, codec=up, codec_down=down)))

    def wait(self, step: int, timeout: float | None = None) -> Operation[None]:
        """Waits until a step is reached, also if its version is no longer kept then.

        Args:
            step: The step.
            timeout: Seconds to wait. None: the client's timeout. math.inf: no limit.

        Raises:
            DeadlineExceededError: The step was not reached in time.
            AbortedError: The parameters were deleted while the call waited.
            NotFoundError: The parameters were deleted before the call.
        """
        return self._home(self._wire.wait(step, self._wait(timeout)))

    def info(self) -> Operation[ParametersInfo]:
        """Describes the parameters as they are now: their step, round, properties and rules.

        Returns:
            A snapshot; it does not change with the parameters.

        Raises:
            NotFoundError: The parameters were deleted.
        """
        return self._home(self._wire.info())

    def rounds(self, since: int = 0) -> Operation[list[RoundRecord]]:
        """Returns the records of the rounds that were applied, as far back as they are kept (`keep_rounds`).

        Args:
            since: The step after which records are returned. 0: all.

        Returns:
            The records, the oldest first.

        Raises:
            NotFoundError: The parameters were deleted.
        """
        return self._home(self._wire.rounds(since))

    def report(
        self,
        metrics: Mapping[str, SupportsFloat],
        step: int | Version,
        *,
        weight: float = 1.0,
        worker_id: str | None = None,
        request_id: int | None = None,
    ) -> Operation[ReportResult]:
        """Stores what was measured of a version, such as its loss on data that nobody trains with.

        Reports of several workers on one version become one evaluation: the mean of each metric, by their weights. It
        is as durable as the records of rounds, and is in them: `RoundRecord.evaluation`; `evaluations` returns all,
        also that of step 0. A report counts once, even if the client has to send it again.

        Args:
            metrics: What was measured, by name, as in `push`; at least one number. All reports on one version together
                have at most 32 names.
            step: The step of the version, or the version.
            weight: Its weight in the means: positive and finite, such as the number of examples.
            worker_id: The sender's id: each worker counts once for each version. None: as in `push`.
            request_id: The `request_id` of a failed attempt's error, to send the same report again; it still counts
                once. None: a new report.

        Returns:
            What became of the report, and the means of all reports on the version.

        Raises:
            InvalidArgumentError: There is no such version yet, or an argument is not within its limits.
            OutOfRangeError: The version is too old: neither it nor the record of its round is kept.
            ResourceExhaustedError: The server has no room for it.
            NotFoundError: The parameters were deleted.
            UnavailableError: The server cannot be reached. It may have counted the report: try again with `request_id`.
        """
        how = Contribution(_step_of(step), weight, worker_id)
        return self._home(self._wire.report(metrics, how, request_id))

    def evaluations(self, since: int | None = None) -> Operation[list[Evaluation]]:
        """Returns what was measured of versions, as far back as it is kept (`keep_rounds` + 1 versions).

        Args:
            since: The step after which evaluations are returned. None: all.

        Returns:
            The evaluations by step, also of versions that no round has made: the first one, and loaded ones.

        Raises:
            NotFoundError: The parameters were deleted.
        """
        return self._home(self._wire.evaluations(since))

    def evaluate(
        self,
        fn: Callable[[Version], Mapping[str, SupportsFloat]],
        *,
        every: int = 1,
        until: int | None = None,
        weight: float = 1.0,
        worker_id: str = "evaluator",
        stop: Callable[[], bool] | None = None,
    ) -> Operation[int]:
        """Measures versions as rounds make them, and reports what it finds, until a step is reached.

        It begins with the version of step 0, or the newest one if that is no longer kept, and goes on with each
        `every`-th step. If a version is gone before its turn comes, the newest one takes its place: an evaluator that
        is slower than the rounds leaves out some, and holds up nobody. Started again, it goes on after the last version
        of which its worker_id has reported. `rounds()` and `evaluations()` have what it has found.

        Args:
            fn: Measures a version: returns numbers by name, as `report` takes them. It runs in the calling thread; with
                `gradserve.aio` in a thread beside the event loop.
            every: The distance between the steps of two versions.
            until: The last step, whose version is measured whatever `every` is. None: without end.
            weight: The weight of each report.
            worker_id: The name of this evaluator. Several that each measure a part of the data need a name each.
            stop: Asked before each version, and twice a second while waiting for one: True ends the loop.
                `threading.Event().is_set`, for instance. None: never.

        Returns:
            The number of versions that it has measured. What `fn` or `stop` raises ends the loop, and is raised.

        Raises:
            InvalidArgumentError: An argument is not valid, or `fn` returned something else than numbers by name.
            AbortedError: The parameters were deleted while the call waited.
            NotFoundError: The parameters were deleted before the call.
        """
        read = self._wire.read
        if not as_text(worker_id, Argument("worker_id")):
            raise Argument("worker_id").error("the name of an evaluator", worker_id)
        how = Contribution(0, weight, worker_id)
        return self._home(evaluate(self._wire, read, fn, EvaluatedSteps.of(every, until), how, stop))

    def change(
        self,
        *,
        optimizer: optim.Optimizer | Unchanged = UNCHANGED,
        schedule: optim.Schedule | Unchanged | None = UNCHANGED,
        num_required: int | Unchanged = UNCHANGED,
        min_required: int | Unchanged | None = UNCHANGED,
        expected: int | Literal["alive"] | Unchanged | None = UNCHANGED,
        grace: float | Literal["adaptive"] | Unchanged = UNCHANGED,
        max_grace: float | Unchanged = UNCHANGED,
        min_interval: float | Unchanged = UNCHANGED,
        deadline: float | Unchanged | None = UNCHANGED,
    ) -> Operation[ParametersInfo]:
        """Changes the optimizer, its schedule or the rules for the end of a round, from the next round on.

        The round that is open ends as it began. Needs the role chief, if the server has access control.

        Args:
            optimizer: The new optimizer. Of the same kind: its state stays; another kind begins with a new state.
            schedule: The new schedule; None: constant. It counts all rounds that were applied.
            num_required: See `Client.parameters`, as for all that follow.
            min_required: The number of updates that end a round at its deadline.
            expected: The number of updates after which nobody else is waited for.
            grace: Seconds in which latecomers count.
            max_grace: The longest adaptive grace.
            min_interval: The shortest time between the ends of two rounds.
            deadline: Seconds after the first update in which a round ends.

        Returns:
            The parameters with the new rules.

        Raises:
            InvalidArgumentError: A value is not valid, or two do not go together.
            PermissionDeniedError: The caller has not the role chief.
            NotFoundError: The parameters were deleted.
        """
        rules = {
            "num_required": num_required,
            "min_required": min_required,
            "expected": expected,
            "grace": grace,
            "max_grace": max_grace,
            "min_interval": min_interval,
            "deadline": deadline,
        }
        changes = {name: value for name, value in rules.items() if not isinstance(value, Unchanged)}
        if isinstance(optimizer, Unchanged) and isinstance(schedule, Unchanged) and not changes:
            raise Argument("optimizer").error_saying("something to change", "nothing")
        return self._home(self._wire.change(changed_properties(optimizer, schedule), changes))

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        optimizer: bool = True,
        progress: Callable[[int, int], object] | bool | None = None,
    ) -> Operation[int]:
        """Writes the newest version to a file in safetensors' format.

        The file has the components as "param/NAME", the state of the optimizer as "optimizer/SLOT/NAME", and the step,
        the optimizer and its counts in its metadata. Nobody ever sees a part of it: it takes the place of an earlier
        file when it is complete.

        Args:
            path: The file.
            optimizer: Whether to save the state of the optimizer, and the values of 16-bit components in float32. A run
                that goes on without them begins with a new state.
            progress: Told how far the transfer from the server is, as by `Client.put`, once it begins.

        Returns:
            The step of the version in the file.

        Raises:
            OSError: The file cannot be written.
            NotFoundError: The parameters were deleted.
        """
        place = as_path(path)
        with_state = as_flag(optimizer, Argument("optimizer"))
        reading = partial(self._wire.read_state, with_state=with_state)
        read = yield from tracked(progress, self._at_home(reading))
        version = read.version
        saved = SavedParameters(
            version.components, version.step, version.digest, read.state, read.schedule, read.update
        )
        yield Work(partial(save, place, saved))
        return version.step

    def load(
        self,
        path: str | os.PathLike[str],
        *,
        optimizer: bool = True,
        progress: Callable[[int, int], object] | bool | None = None,
    ) -> Operation[ParametersInfo]:
        """Makes a saved version the next one, for all workers. Updates of the open round are dropped, as stale.

        Its step is that of the file if this is greater than the present step, otherwise the next step. Optimizer,
        schedule and rules stay as they are. Needs the role chief, if the server has access control.

        Args:
            path: A file that `save` has written, or a model in a safetensors file of another program.
            optimizer: Whether to load the state of the optimizer, if the file has it. Otherwise it begins with a new
                state.
            progress: Told how far the transfer to the server is, as by `Client.put`.

        Returns:
            The parameters after it.

        Raises:
            InvalidArgumentError: The file is damaged or something else, or it has other components, or the state of
                another optimizer. Nothing was sent.
            OSError: The file cannot be read.
            PermissionDeniedError: The caller has not the role chief.
            NotFoundError: The parameters were deleted.
        """
        place = as_path(path)
        with_state = as_flag(optimizer, Argument("optimizer"))
        saved: SavedParameters = yield Work(partial(load_parameters, place))
        loading = partial(self._wire.load, saved, with_state=with_state)
        return (yield from tracked(progress, self._at_home(loading)))

    def fork(
        self,
        step: int | None = None,
        *,
        shared_name: str,
        container: str = "",
        idle_lease: float | None = None,
    ) -> Operation[ParametersCalls]:
        """Creates parameters that begin with a version of these, on the server, with their properties and rules.

        Args:
            step: The step of the version. None: the newest, with the state of the optimizer. An older one must be kept,
                and begins with a new state.
            shared_name: The name of the new parameters.
            container: The namespace of the name. Empty: the default one.
            idle_lease: Seconds without use after which the server deletes them. None: never.

        Returns:
            The new parameters.

        Raises:
            OutOfRangeError: The version is no longer kept.
            AlreadyExistsError: The name is taken by other parameters.
            InvalidArgumentError: In a cluster, the name belongs to another server than these parameters.
            NotFoundError: The parameters were deleted.
        """
        wire = yield from self._cache.fork(self._wire, step, shared_name, container, idle_lease)
        return ParametersCalls(wire, self._cache, self._timeout)

    def delete(self) -> Operation[bool]:
        """Deletes the parameters, for all clients. Calls that wait on them end with AbortedError.

        Returns:
            Whether they still existed.
        """
        return self._home(self._wire.delete())

    def _wait(self, timeout: float | None) -> float:
        return self._timeout if timeout is None else check_timeout(timeout)

    def _at_home(self, begin: Callable[[Progress | None], Operation[T]]) -> Callable[[Progress | None], Operation[T]]:
        return lambda progress: self._home(begin(progress))

    def _home(self, operation: Operation[T]) -> Operation[T]:
        """Sends an operation to the server, or the servers, that have the parameters."""
        return self._wire.aimed(operation)


def _step_of(local_step: Any) -> int:
    """Returns the step of a version, or the step itself; the request checks whether that is a number."""
    step: int = local_step.step if isinstance(local_step, Version) else local_step
    return step
