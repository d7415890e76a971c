"""The worker: counts inner steps, and synchronizes fragments when their turn has come."""

import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, TypeAlias, Unpack, get_args

from numpy.typing import NDArray

from gradserve import optim
from gradserve.client import Client
from gradserve.conversion.plain import as_integer
from gradserve.parameter_records import PushPull
from gradserve.parameters import Parameters
from gradserve.training.diloco.fragment import Fragment, Update
from gradserve.training.diloco.plan import Arrays, Local, Plan, RunOptions, Work
from gradserve.training.shared_data import SharedData
from gradserve.workers import new_worker_id
from gradserve_protocol.argument import Argument
from gradserve_protocol.errors import AlreadyExistsError, GradserveError, InvalidArgumentError

IfExists: TypeAlias = Literal["join", "error"]

NESTEROV = optim.SGD(0.7, momentum=0.9, nesterov=True)
"""DiLoCo's outer optimizer."""
_log = logging.getLogger(__name__)


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
    update: Update
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
        """Values owed to the caller, as an exception has kept them from it: what to add to its own."""
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
        except BaseException:  # also Ctrl-C: the server may have counted it; what is done from here on comes later
            begun.update.has_failed = True
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

    found = [
        Fragment(finder(number), values, plan, to_framework, client.new_request_id, data)
        for number, values in enumerate(fragments)
    ]
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
