"""One worker's part in DiLoCo and LocalSGD, whatever framework takes its inner steps.

DiLoCo: https://arxiv.org/abs/2311.08105; with fragments, delay and mixing: https://arxiv.org/abs/2501.18512.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Literal, NamedTuple, TypeAlias, TypedDict, Unpack, get_args

from numpy.typing import NDArray

from gradserve import optim, reductions
from gradserve.client import Client
from gradserve.codecs import Codec, as_codec
from gradserve.conversion.plain import as_integer, as_number
from gradserve.data import Batches
from gradserve.parameter_records import PushPull, Version
from gradserve.parameters import Parameters
from gradserve.results import Outcome
from gradserve.training.shared_data import SharedData
from gradserve.workers import new_worker_id
from gradserve_protocol.argument import Argument
from gradserve_protocol.errors import (
    AlreadyExistsError,
    DeadlineExceededError,
    GradserveError,
    InvalidArgumentError,
    LostError,
    ResourceExhaustedError,
    UnavailableError,
)

Arrays: TypeAlias = Mapping[str, Any]
"""Arrays of a framework by name, in the memory of the host, which can be added and multiplied."""
Local: TypeAlias = Callable[[Collection[str]], Arrays]
"""Returns the present local values of some components."""
Weight: TypeAlias = Literal["tokens", "steps", "equal"] | Callable[[int, int], float]
OnFailure: TypeAlias = Literal["continue", "reset"]
IfExists: TypeAlias = Literal["join", "error"]

NESTEROV = optim.SGD(0.7, momentum=0.9, nesterov=True)
"""DiLoCo's outer optimizer."""
_PASSING = (DeadlineExceededError, UnavailableError, ResourceExhaustedError)
"""The errors after which training goes on: the next synchronization may succeed."""
_MOST_STEPS = range(1, 1 << 40)
_FRAGMENTS = Argument("fragments")
_DATA = Argument("data")
_log = logging.getLogger(__name__)


class RunOptions(TypedDict, total=False):
    """Arguments of `Client.parameters` that runs take, too."""

    min_required: int | None
    expected: int | Literal["alive"] | None
    grace: float | Literal["adaptive"]
    max_grace: float
    min_interval: float
    deadline: float | None
    max_staleness: int
    staleness: str
    normalize: str
    reduction: reductions.Reduction | str
    clip_norm: float | None
    schedule: optim.Schedule | None
    keep_versions: int
    keep_rounds: int
    deterministic: bool
    refuse_non_finite: bool
    idle_lease: float | None
    durability: str | None
    agreement: Mapping[str, str] | None
    sharded: bool


class Work(NamedTuple):
    """The work in an update: its tokens, as far as the program has counted them, and its inner steps."""

    tokens: int = 0
    steps: int = 0

    def plus(self, other: "Work") -> "Work":
        return Work(self.tokens + other.tokens, self.steps + other.steps)

    def minus(self, other: "Work") -> "Work":
        return Work(self.tokens - other.tokens, self.steps - other.steps)


@dataclass(frozen=True)
class Plan:
    """The turns of fragments, and the rules by which a worker goes on.

    Attributes:
        sync_every: The inner steps between two synchronizations of a fragment.
        num_fragments: The number of fragments, which take turns.
        delay: The inner steps between taking an update and loading the version that it led to.
        alpha: The part of the local values that stays when a version is loaded.
        weight: The weight of an update: its tokens, its steps, 1, or what a function of both returns.
        on_failure: What happens to local values when a synchronization fails; None: "continue", with data "reset".
        codec: How updates travel; None: as they are.
        codec_down: How versions travel; likewise.
        data: The samples of the worker, if the run shares them out.
    """

    sync_every: int
    num_fragments: int = 1
    delay: int = 0
    alpha: float = 0.0
    weight: Weight = "steps"
    on_failure: OnFailure | None = None
    codec: Codec | str | None = None
    codec_down: Codec | str | None = None
    data: Batches[Any] | None = None

    def __post_init__(self) -> None:
        """Checks the values.

        Raises:
            InvalidArgumentError: One is not valid; the message has the name that `DiLoCo` gives it.
        """
        sync_every = Argument("sync_every")
        as_integer(self.sync_every, sync_every, _MOST_STEPS)
        if self.sync_every % self.num_fragments:
            raise sync_every.error(f"a multiple of the number of fragments, {self.num_fragments},", self.sync_every)
        as_integer(self.delay, Argument("fragment_sync_delay"), range(self.sync_every))
        alpha = Argument("fragment_update_alpha")
        if not 0 <= as_number(self.alpha, alpha) <= 1:
            raise alpha.error("a number from 0 to 1", self.alpha)
        if not callable(self.weight) and self.weight not in ("tokens", "steps", "equal"):
            raise Argument("weight").error("'tokens', 'steps', 'equal' or a function of tokens and steps", self.weight)
        if self.on_failure not in (None, *get_args(OnFailure)):
            raise Argument("on_failure").error("'continue' or 'reset'", self.on_failure)
        as_codec(self.codec, Argument("codec"))
        as_codec(self.codec_down, Argument("codec_down"), of_version=True)
        if self.data is not None:
            self._check_data(self.data)

    def _check_data(self, data: Batches[Any]) -> None:
        """Checks that each update is of the samples of its round, and of no others."""
        if not isinstance(data, Batches):
            raise _DATA.error("what gradserve.data.sampler or stream has returned", data)
        if data.batches_per_step % self.sync_every:
            expected = f"batches_per_step to be sync_every, {self.sync_every}, or a multiple of it,"
            raise _DATA.error_saying(expected, str(data.batches_per_step))
        needed = {
            "fragments": (self.num_fragments, 1, "one fragment"),
            "fragment_sync_delay": (self.delay, 0, "no delay"),
            "fragment_update_alpha": (self.alpha, 0, "0"),
            "on_failure": (self.on_failure or "reset", "reset", "'reset'"),
        }
        for name, (given, value, words) in needed.items():
            if given != value:
                raise Argument(name).error(f"{words} with data, so that each sample counts once,", given)

    @property
    def resets(self) -> bool:
        """True if a worker goes back to the version that it had when a synchronization fails."""
        return self.on_failure == "reset" or self.data is not None

    @property
    def period(self) -> int:
        """The inner steps between two synchronizations, of whichever fragment."""
        return self.sync_every // self.num_fragments

    def is_due(self, num_taken: int) -> bool:
        """Returns True if a synchronization may begin or end after this step, of those that a worker has taken."""
        return not (num_taken % self.period and (num_taken + self.delay) % self.period)

    def weight_of(self, work: Work) -> float:
        """Returns the weight of an update.

        Raises:
            InvalidArgumentError: It goes by tokens, and none were counted.
        """
        if callable(self.weight):
            return self.weight(work.tokens, work.steps)
        if self.weight == "equal":
            return 1.0
        if self.weight == "tokens" and not work.tokens:
            raise Argument("weight").error_saying("count(tokens=...) in each step, for weight='tokens'", "no tokens")
        return float(work.tokens if self.weight == "tokens" else work.steps)


@dataclass
class _Update:
    """An update from when it is taken until it is known what became of it.

    Attributes:
        delta: The local values minus those of its base.
        base: The version from which it was computed.
        work: The work in it.
        weight: Its weight.
        metrics: The means of what was reported since the update before it.
        has_failed: Whether an attempt to push it has failed.
        request_id: The id of that attempt, if the server may have counted it.
        pushed: What became of it, once that is known.
    """

    delta: Arrays
    base: Version
    work: Work
    weight: float
    metrics: Mapping[str, float]
    has_failed: bool = False
    request_id: int | None = None
    pushed: PushPull | None = None


class Fragment:
    """Components that are synchronized together: parameters on the server, and the version last loaded of them."""

    def __init__(
        self,
        find: Callable[[Any], Parameters],
        values: Arrays,
        plan: Plan,
        to_framework: Callable[[NDArray[Any]], Any],
        data: SharedData | None = None,
    ) -> None:
        """Finds or creates the parameters.

        Args:
            find: Finds parameters, or creates them with these values.
            values: The initial values.
            plan: The rules by which the fragment is synchronized.
            to_framework: Returns an array of a version as the framework's, in the same memory.
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
        self._update: _Update | None = None

    def values(self, version: Version | None = None) -> dict[str, Any]:
        """Returns the values of a version, by default of the one last loaded. They must not be changed."""
        return {name: self._to_framework((version or self.base)[name]) for name in self.names}

    def report(self, metrics: Mapping[str, float]) -> None:
        """Notes what was measured in a step, for the next update."""
        for name, number in metrics.items():
            self._reported.setdefault(name, []).append(as_number(number, Argument(name)))

    def take(self, local: Local) -> _Update:
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
            self._update = _Update(delta, self.base, self.work, weight, metrics)
        return self._update

    def push(self, update: _Update, worker_id: str, timeout: float | None) -> PushPull | GradserveError:
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
        self._update, self.base = None, pulled.version
        common = self.values()
        since = self.work.minus(update.work)
        counts = pulled.outcome is Outcome.ACCEPTED
        if update.has_failed:  # what was done since, and all that did not count, is in the next update
            before = self.values(update.base)
            kept = {name: own[name] - before[name] for name in self.names}
            if counts:
                self.work = since
                kept = {name: kept[name] - update.delta[name] for name in self.names}
            return {name: common[name] + kept[name] for name in self.names}
        if not counts:
            _log.warning("an update of %s was dropped: %s", self.parameters.name, pulled.outcome.name)
        if not (counts and alpha):
            self.work = Work()
            return common
        self.work = since
        return {name: alpha * own[name] + (1 - alpha) * common[name] for name in self.names}

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
        self._update.request_id = error.request_id or self._update.request_id
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


@dataclass
class _Synchronization:
    """A synchronization under way.

    Attributes:
        fragment: Its fragment.
        due: The inner step, of those that this worker has taken, after which it ends.
        result: What comes of it; None if it is only made then.
        update: Its update.
    """

    fragment: Fragment
    due: int
    update: _Update
    result: "Future[PushPull | GradserveError] | None" = None


class _Values:
    """Local values while fragments are synchronized: the caller's, or those that replace them."""

    def __init__(self, local: Local, owed: Arrays) -> None:
        """`owed` is what must be added to the caller's values first."""
        self._local = local
        own = local(tuple(owed)) if owed else {}
        self.replaced = {name: own[name] + owed[name] for name in owed}

    def __call__(self, names: Collection[str]) -> dict[str, Any]:
        own = self._local([name for name in names if name not in self.replaced])
        return {name: self.replaced[name] if name in self.replaced else own[name] for name in names}

    def changes(self) -> dict[str, Any]:
        """Returns what must be added to the caller's values to replace them."""
        own = self._local(tuple(self.replaced))
        return {name: value - own[name] for name, value in self.replaced.items()}


class DilocoWorker:
    """Counts the inner steps of a worker, and synchronizes fragments when their turn has come.

    Not safe to use from several threads.

    Attributes:
        fragments: The fragments.
        worker_id: The worker's id.
        num_failed: The number of synchronizations that have failed since the last one that did not.
    """

    def __init__(self, fragments: Sequence[Fragment], plan: Plan, worker_id: str, timeout: float | None) -> None:
        """Begins with the versions that the fragments have.

        Args:
            fragments: The fragments.
            plan: The rules by which they are synchronized.
            worker_id: The worker's id.
            timeout: The longest wait for other workers, in seconds; None: the client's timeout.
        """
        self.fragments = fragments
        self.worker_id = worker_id
        self.num_failed = 0
        self._plan = plan
        self._timeout = timeout
        self._num_taken = 0
        self._step = self._step_of_versions()
        self._under_way: list[_Synchronization] = []
        self._owed: Arrays = {}
        """What must be added to the caller's values, as an exception has kept from it those that replace them."""
        self._threads = ThreadPoolExecutor(len(fragments), "gradserve-diloco") if plan.delay else None

    @property
    def version(self) -> int:
        """The step of the version last loaded; of several fragments, the least."""
        return min(each.base.step for each in self.fragments)

    @property
    def step(self) -> int:
        """The number of inner steps of the run behind the local values: a worker that joins begins with the others'."""
        return self._step

    def values(self) -> dict[str, Any]:
        """Returns the values of the versions last loaded."""
        return {name: value for each in self.fragments for name, value in each.values().items()}

    def count(self, tokens: int) -> None:
        """Counts tokens of the present step."""
        number = as_integer(tokens, Argument("tokens"), range(1 << 62))
        for each in self.fragments:
            each.work = each.work.plus(Work(tokens=number))

    def report(self, metrics: Mapping[str, float]) -> None:
        """Notes what was measured in the present step: the next update has the means."""
        for each in self.fragments:
            each.report(metrics)

    def take_step(self, local: Local) -> dict[str, Any]:
        """Counts an inner step that was taken, and synchronizes what is due; see `synchronize_due`."""
        self.count_step()
        return self.synchronize_due(local)

    def count_step(self) -> None:
        """Counts an inner step that was taken."""
        self._num_taken += 1
        self._step += 1
        for each in self.fragments:
            each.work = each.work.plus(Work(steps=1))

    def synchronize_due(self, local: Local) -> dict[str, Any]:
        """Begins and ends the synchronizations that are due after the steps that were counted.

        Args:
            local: Returns the present values of components.

        Returns:
            The values of the components that must be replaced. If an exception keeps some from the caller, the next
            call returns them, with what was done since.

        Raises:
            GradserveError: A synchronization failed, and later ones would.
        """
        plan = self._plan
        if not plan.is_due(self._num_taken):
            return {}
        with self._replacing(local) as values:
            self._end_all(self._due(self._num_taken - 1), values)  # those that an exception has left
            if (self._num_taken + plan.delay) % plan.period == 0:
                self._under_way.append(self._begin(self._next_fragment(), values))
            self._end_all(self._due(self._num_taken), values)
        return values.replaced

    def synchronize(self, local: Local) -> dict[str, Any]:
        """Synchronizes all fragments with work in them now, and restarts their turns; else as `synchronize_due`."""
        try:
            with self._replacing(local) as values:
                rest = (self._begin(each, values, inline=True) for each in self.fragments if each.work.steps)
                self._end_all(chain(self._due(math.inf), rest), values)
        finally:
            self.restart_turns()
        return values.replaced

    def restart_turns(self) -> None:
        """Counts the steps between synchronizations from here on."""
        self._num_taken = 0
        for each in self._under_way:
            each.due = 0

    def finish(self, local: Local) -> dict[str, Any]:
        """Waits for the synchronizations under way; otherwise as `synchronize_due`."""
        with self._replacing(local) as values:
            self._end_all(self._due(math.inf), values)
        return values.replaced

    def close(self) -> None:
        """Waits for nothing."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def _next_fragment(self) -> Fragment:
        """Returns the fragment whose version is the oldest: the same for all workers, whenever they have joined."""
        busy = [each.fragment for each in self._under_way]
        return min((each for each in self.fragments if each not in busy), key=lambda each: each.base.step)

    def _begin(self, fragment: Fragment, values: _Values, *, inline: bool = False) -> _Synchronization:
        update = fragment.take(values)
        begun = _Synchronization(fragment, self._num_taken + self._plan.delay, update)
        if self._threads is not None and not inline:
            begun.result = self._threads.submit(fragment.push, update, self.worker_id, self._timeout)
        return begun

    def _due(self, step: float) -> Iterator[_Synchronization]:
        """Yields what is under way and due until a step, which then is no longer under way."""
        while self._under_way and self._under_way[0].due <= step:
            yield self._under_way[0]
            self._under_way.pop(0)

    def _end_all(self, begun: Iterable[_Synchronization], values: _Values) -> None:
        """Ends synchronizations; raises the first error when all have ended."""
        errors = list[GradserveError]()
        for each in begun:
            try:
                self._end(each, values)
            except GradserveError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _end(self, begun: _Synchronization, values: _Values) -> None:
        fragment = begun.fragment
        try:
            if begun.result is None:
                result = fragment.push(begun.update, self.worker_id, self._timeout)
            else:
                result = begun.result.result()
        except InvalidArgumentError:
            fragment.forget_update()
            raise
        if isinstance(result, GradserveError):
            self.num_failed += 1
            _log.warning("no synchronization of %s, training goes on: %s", fragment.parameters.name, result)
            values.replaced |= fragment.fail(result, values)
            return
        self.num_failed = 0
        values.replaced |= fragment.load(result, values)
        self._step = max(self._step, self._step_of_versions())

    @contextmanager
    def _replacing(self, local: Local) -> Iterator[_Values]:
        """Yields the values with which fragments are synchronized; keeps those that an exception takes along."""
        values = _Values(local, self._owed)
        try:
            yield values
        except BaseException:
            self._owed = values.changes()
            raise
        self._owed = {}

    def _step_of_versions(self) -> int:
        version = self.version
        ahead = sum(each.base.step > version for each in self.fragments)
        return version * self._plan.sync_every + ahead * self._plan.period


def begin_diloco(
    client: Client,
    fragments: Sequence[Arrays],
    *,
    plan: Plan,
    name: str,
    num_required: int,
    outer_optimizer: optim.Optimizer,
    to_framework: Callable[[NDArray[Any]], Any],
    worker_id: str | None,
    timeout: float | None,
    container: str,
    if_exists: IfExists,
    **options: Unpack[RunOptions],
) -> DilocoWorker:
    """Finds or creates the parameters of a run, and returns a worker that has their newest versions.

    Args:
        client: The client.
        fragments: The initial values of each fragment.
        plan: The rules by which they are synchronized.
        name: The name of the run: of the first fragment's parameters. That of fragment N is NAME/N.
        num_required: The number of updates that end a round.
        outer_optimizer: The optimizer on the server.
        to_framework: See `Fragment`.
        worker_id: The worker's id. None: that of GRADSERVE_WORKER_ID, or a new one.
        timeout: See `DilocoWorker`.
        container: The namespace of the name.
        if_exists: What to do if the run has versions already.
        options: Further arguments of `Client.parameters`.

    Raises:
        AlreadyExistsError: The run has another model or another sync_every; or versions, with if_exists="error".
        InvalidArgumentError: An argument is not valid.
    """
    if if_exists not in get_args(IfExists):
        raise Argument("if_exists").error("'join' or 'error'", if_exists)
    own_id, data = worker_id or new_worker_id(), None
    agreement = {"sync_every": str(plan.sync_every)}
    if plan.data is not None:
        if options.get("max_staleness"):
            raise Argument("max_staleness").error(
                "0 with data, so that each sample counts once,", options["max_staleness"]
            )
        agreement["data"] = "; ".join(f"{key} {text}" for key, text in plan.data.settings.items())
        data = SharedData(plan.data, client, own_id, container, options.get("durability"))
    options["agreement"] = {**agreement, **(options.get("agreement") or {})}

    def finder(number: int) -> Callable[[Any], Parameters]:
        return lambda values: client.parameters(
            values,
            shared_name=f"{name}/{number}" if number else name,
            container=container,
            num_required=num_required,
            optimizer=outer_optimizer,
            update="delta",
            **options,
        )

    found = [Fragment(finder(number), values, plan, to_framework, data) for number, values in enumerate(fragments)]
    if if_exists == "error" and any(each.base.step for each in found):
        steps = max(each.base.step for each in found)
        raise AlreadyExistsError(
            f"the run {name!r} has {steps} versions already; take another name, delete its parameters, or join it with "
            "if_exists='join'",
            field="name",
            code="GS_RUN_EXISTS",
        )
    has = found[0].parameters.info()
    if has.optimizer != outer_optimizer:
        _log.warning(
            "the run %r has outer optimizer %r, not %r: see Parameters.change", name, has.optimizer, outer_optimizer
        )
    return DilocoWorker(found, plan, own_id, timeout)


def fragments_of(sizes: Mapping[str, int], fragments: Any) -> list[list[str]]:
    """Returns the names of the components in each fragment.

    Args:
        sizes: The bytes of each component, by name.
        fragments: None for one fragment; their number, by which components are divided by size; or lists of names.

    Raises:
        InvalidArgumentError: There are fewer components than fragments; or a name is unknown, missing, or in two
            fragments.
    """
    if fragments is None:
        return [list(sizes)]
    return _by_size(sizes, fragments) if isinstance(fragments, int) else _by_name(sizes, fragments)


def _by_size(sizes: Mapping[str, int], number: int) -> list[list[str]]:
    """Divides components into fragments of about the same size: each, the greatest first, to the smallest fragment."""
    as_integer(number, _FRAGMENTS, range(1, 1 << 16))
    if len(sizes) < number:
        raise _FRAGMENTS.error(f"at most {len(sizes)}, the number of components,", number)
    sums, members = [0] * number, [set[str]() for _ in range(number)]
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        smallest = min(range(number), key=lambda index: (sums[index], index))
        sums[smallest] += sizes[name]
        members[smallest].add(name)
    return [[name for name in sizes if name in each] for each in members]


def _by_name(names: Collection[str], fragments: Any) -> list[list[str]]:
    """Returns lists of names that together are all names, each once."""
    if isinstance(fragments, str) or not all(isinstance(each, list | tuple) for each in fragments) or not fragments:
        raise _FRAGMENTS.error("a number, or lists of names or modules", fragments)
    given = Counter(name for each in fragments for name in each)
    if given != Counter(list(names)) or not all(fragments):
        raise InvalidArgumentError(
            f"expected each parameter of the model in one fragment, and no empty one, got fragments {fragments!r} for "
            f"{', '.join(names)}",
            field="fragments",
        )
    return [list(each) for each in fragments]
