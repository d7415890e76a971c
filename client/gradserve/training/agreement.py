"""The agreement of the workers of a run: the values that the first one sends count for all, and weights are compared.

They agree on the state with which they begin, on their settings, on which of them ends an earlier run of the same name,
and on the step from which they go on after a restart of the server. Digests of their parameters travel with every K-th
gradient, so that they notice if these differ.
"""

import functools
import logging
import math
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from gradserve.accumulators import GradientAccumulator
from gradserve.client import Client
from gradserve.conversion.arrays import as_dtype
from gradserve.conversion.plain import as_integer
from gradserve.errors import AbortedError, AlreadyExistsError, InvalidArgumentError
from gradserve.results import ArrayLike, Average, DenseSpec, DifferentWorker, Outcome
from gradserve.training.state import COMPONENTS, DATA, TEXT, Arrived, Carried, State, as_text, of_text
from gradserve_protocol.argument import Argument
from gradserve_protocol.digest import digest_of

DAY_SECONDS = 24 * 3600.0
"""The idle lease of most accumulators beside that of the gradients."""
PAUSE_SECONDS = 0.1
"""The pause between two checks for another worker's action."""
_SETTINGS_SECONDS = 30 * DAY_SECONDS
"""The idle lease of settings: a worker may join after weeks, and they are small."""
_SHOWN = 5
NEVER_STALE = 1 << 62
"""A local step that no accumulator reaches: what is sent with it has no step."""
_CHOICE = DenseSpec("float64", ())
_PROPOSALS_SECONDS = 1.0
"""The time for proposals: workers that wait for a round notice a restart at once, others with their next call."""
_SETTING_SECONDS = 5.0
"""The time for which others wait until the worker whose step was chosen has set it."""
_SETTING_PAUSE_SECONDS = 0.05
GONE_ON = -1
"""In place of a step: workers that know nothing of the earlier steps have trained already."""


def of_first_worker(
    client: Client,
    name: str,
    container: str,
    worker_id: str,
    components: Mapping[str, DenseSpec],
    own: Callable[[], Mapping[str, Any]],
    *,
    idle_lease: float = DAY_SECONDS,
    durability: str | None = None,
) -> Average | None:
    """Returns what the first worker has sent; None if this worker is the first.

    It is the average of the first round of an accumulator, which has one gradient.

    Args:
        client: The client.
        name: The name of the accumulator.
        container: The namespace of the name.
        worker_id: The id of this worker.
        components: The components of the accumulator.
        own: Returns what this worker sends; called only if no worker has sent anything yet.
        idle_lease: Seconds for which it is kept after its last use.
        durability: As in `Client.gradient_accumulator`.
    """
    accumulator = client.gradient_accumulator(
        dict(components),
        shared_name=name,
        container=container,
        idle_lease=idle_lease,
        durability=durability,
        device="cpu",
        sharded=False,
    )
    if accumulator.info().global_step:
        return accumulator.read_average(1)
    result = accumulator.push_pull(own(), 1, worker_id=worker_id, on_stale="return")
    return None if result.outcome is Outcome.ACCEPTED else result


def is_successor(client: Client, name: str, container: str, worker_id: str) -> bool:
    """Returns True for exactly one of the workers that ask: the one that deletes the accumulator of a run that is over.

    It is the worker with the only gradient of the first round of accumulator NAME/successor.

    Args:
        client: The client.
        name: The name of the run that is over, with what distinguishes it from others of the same name.
        container: The namespace of the name.
        worker_id: The id of this worker.
    """
    components, claim = {"claim": DenseSpec("float32", ())}, {"claim": np.float32(1)}
    return of_first_worker(client, f"{name}/successor", container, worker_id, components, lambda: claim) is None


def agree_on_settings(
    client: Client, name: str, container: str, worker_id: str, settings: Mapping[str, Mapping[str, str]]
) -> None:
    """Compares the settings of this worker with those of the first worker that came.

    They are the average of the first round of accumulator NAME/settings-KIND, which has one gradient.

    Args:
        client: The client.
        name: The name of the training run, with what distinguishes it from earlier runs of the same name.
        container: The namespace of the name.
        worker_id: The id of this worker.
        settings: Texts by name, by kind of worker: workers of other kinds have other settings. Only the settings that
            both workers have are compared.

    Raises:
        AlreadyExistsError: The first worker has other settings; the message has both values of each.
    """
    for kind, own in settings.items():
        theirs = _first(client, f"{name}/settings-{kind}", container, worker_id, own)
        different = [each for each in own if theirs.get(each, own[each]) != own[each]]
        if different:
            shown = "; ".join(f"{each} is {theirs[each]} there and {own[each]} here" for each in different[:_SHOWN])
            more = f"; and {len(different) - _SHOWN} more" if len(different) > _SHOWN else ""
            raise AlreadyExistsError(
                f"worker {worker_id!r} has other settings than the worker that began this training run: {shown}{more}. "
                "All workers need the same ones, as their weights would differ otherwise; give another run another "
                "name",
                code="GS_WORKERS_DIFFER",
            )


def checked_settings(settings: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, str]]:
    """Returns a copy of settings.

    Raises:
        InvalidArgumentError: They are not texts by name, by kind of worker.
    """
    copied = {kind: dict(each) for kind, each in settings.items()}
    for kind, own in copied.items():
        for name, text in own.items():
            if not isinstance(name, str) or not isinstance(text, str):
                raise InvalidArgumentError(
                    f"expected texts by name for settings[{kind!r}], got {text!r} for {name!r}", field="settings"
                )
    return copied


def _first(client: Client, name: str, container: str, worker_id: str, own: Mapping[str, str]) -> Mapping[str, str]:
    sent = of_first_worker(
        client,
        name,
        container,
        worker_id,
        {"text": TEXT},
        lambda: {"text": as_text(dict(own))},
        idle_lease=_SETTINGS_SECONDS,
    )
    found: Mapping[str, str] = own if sent is None else of_text(sent["text"])
    return found


def agreed_initial_state(client: Client, name: str, container: str, worker_id: str, own: State) -> State | None:
    """Makes the state of the first worker that comes that of all.

    It is the average of the first round of accumulator NAME/initial, which has one gradient.

    Args:
        client: The client.
        name: The name of the training run, with what distinguishes it from earlier runs of the same name.
        container: The namespace of the name.
        worker_id: The id of this worker.
        own: The state of this worker.

    Returns:
        The tensors of the first worker, and what has counted of its data, with this worker's metadata; None if this
        worker is the first.

    Raises:
        AlreadyExistsError: The first worker has other tensors.
        InvalidArgumentError: The state cannot travel.
    """
    carried = Carried.of(own)
    if not carried.layout:
        return None
    # Kept for a day after the last worker began: it takes as much memory as the model.
    first = of_first_worker(client, f"{name}/initial", container, worker_id, COMPONENTS, carried.gradient)
    return None if first is None else _as_all(first, carried, own)


def _as_all(average: Average, carried: Carried, own: State) -> State:
    """Returns what the first worker began with, for a worker whose own state has the same tensors."""
    first = Arrived.of(average)
    for name in {**first.layout, **carried.layout}:
        if first.layout.get(name) != carried.layout.get(name):
            raise AlreadyExistsError(
                f"the first worker of the training run began with {_described(first, name)}, and this worker has "
                f"{_described(carried, name)}; all workers must begin with the same tensors",
                field="state",
                code="GS_WORKERS_DIFFER",
            )
    of_all = {name: each for name, each in first.state.metadata.items() if name == DATA}
    return State(first.state.tensors, {name: each for name, each in own.metadata.items() if name != DATA} | of_all)


def _described(state: Arrived | Carried, name: str) -> str:
    if name not in state.layout:
        return f"no tensor {name!r}"
    dtype, shape = state.layout[name]
    return f"tensor {name!r} of dtype {dtype} and shape {tuple(shape)}"


def resume(client: Client, run: str, container: str, accumulator: GradientAccumulator, step: int) -> int:
    """Chooses one step for all, the highest that is proposed within a second, and lets the new accumulator begin there.

    Workers at different steps have applied different averages: a worker at any other step than the chosen one, earlier
    or later, has to take over the state of a worker at that step.

    Proposals are the senders in accumulator NAME/steps; the choice is the average of the first round of NAME/resumed.

    Args:
        client: The client.
        run: The name of the training run, with what distinguishes the new accumulator from the one that was lost.
        container: The namespace of the name.
        accumulator: The new accumulator of the gradients.
        step: The step of this worker.

    Returns:
        The step, or GONE_ON. Choosing takes a second.
    """

    @functools.cache
    def own() -> dict[str, np.float64]:
        candidate = _highest(client, run, container, step)
        has_gone_on = accumulator.info().global_step >= max(candidate, 1)
        return {"step": np.float64(GONE_ON if has_gone_on else candidate)}

    chosen = of_first_worker(
        client, f"{run}/resumed", container, uuid.uuid4().hex, {"step": _CHOICE}, own, durability="none"
    )
    base = int((own() if chosen is None else chosen)["step"])
    end = time.monotonic() + _SETTING_SECONDS
    while chosen is not None and accumulator.info().global_step < base and time.monotonic() < end:
        time.sleep(_SETTING_PAUSE_SECONDS)
    if accumulator.info().global_step < base:
        # A worker that was started after the restart, and knows nothing of the run, may have sent a gradient of step 0.
        accumulator.set_global_step(base, drop_gradients=True)
    return base


def _highest(client: Client, run: str, container: str, step: int) -> int:
    proposals = client.gradient_accumulator(
        {"step": DenseSpec("float32", ())},
        shared_name=f"{run}/steps",
        container=container,
        idle_lease=DAY_SECONDS,
        durability="none",
        device="cpu",
        sharded=False,
    )
    proposals.apply_grad({"step": np.float32(0)}, local_step=NEVER_STALE, worker_id=f"{step}/{uuid.uuid4().hex}")
    time.sleep(_PROPOSALS_SECONDS)
    return max(int(each.partition("/")[0]) for each in proposals.info().worker_ids)


_log = logging.getLogger(__name__)
_EVERY = Argument("compare_every")
_PARAMETERS = Argument("parameters")
_BYTES_PER_STEP = 4 << 20
"""The bytes that are read for digests at each step, in the mean, if nobody says how often: some 0.4 ms."""
_LEAST, _MOST = 10, 1000
_NUM_NAMED = 5

Compared = Callable[[], Mapping[str, ArrayLike] | None]
"""Returns a worker's parameters by name, in the memory of the host; None if they are not at hand."""


class WeightsCheck:
    """One worker's part in comparing parameters. The server compares, and its averages say who has others than most."""

    def __init__(self, run: str, worker_id: str, every: int, parameters: Compared, *, is_strict: bool) -> None:
        """Sends nothing yet.

        Args:
            run: The name of the run, for messages.
            worker_id: The id of the worker.
            every: Parameters are compared at each step that this divides.
            parameters: Returns this worker's.
            is_strict: Whether the worker ends with an error if its parameters are not those of most. Otherwise a
                warning is logged.
        """
        self._run = run
        self._worker_id = worker_id
        self._every = every
        self._parameters = parameters
        self._is_strict = is_strict
        self._different: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls,
        run: str,
        worker_id: str,
        every: int | None,
        parameters: Compared | None,
        specs: Sequence[ArrayLike | DenseSpec],
    ) -> "WeightsCheck | None":
        """Returns the check for the arguments of a worker; None if it is not to compare.

        Args:
            run: The name of the run.
            worker_id: The id of the worker.
            every: The argument `compare_every`.
            parameters: The argument `compared`.
            specs: The parameters, or what has their dtypes and shapes.

        Raises:
            InvalidArgumentError: An argument is not valid.
        """
        if every is None:
            return None if parameters is None else cls(run, worker_id, _usual(specs), parameters, is_strict=False)
        if not as_integer(every, _EVERY):
            return None
        if every < 0 or parameters is None:
            raise InvalidArgumentError(
                f"expected compare_every of at least 0, and compared with it, got {every} and "
                f"{'none' if parameters is None else 'one'}",
                field="compare_every",
            )
        return cls(run, worker_id, every, parameters, is_strict=True)

    def compares_at(self, step: int) -> bool:
        """Returns True if parameters are compared at a step."""
        return step % self._every == 0

    def to_send(self, step: int) -> bytes | None:
        """Returns the digest that travels with the gradient of a step; None for none."""
        parameters = self._parameters() if self.compares_at(step) else None
        if parameters is None:
            return None
        return digest_of([np.ascontiguousarray(parameters[name]) for name in sorted(parameters)])

    def look(self, step: int, average: Average) -> None:
        """Looks at what the round of a step has shown.

        Raises:
            AbortedError: This worker has other parameters than most, and the check is strict.
        """
        different = {each.worker_id: each for each in average.different_workers}
        own = different.get(self._worker_id)
        if own is not None and self._is_strict:
            raise AbortedError(
                f"at step {step} of training run {self._run!r}, worker {self._worker_id!r} has other parameters than "
                f"most of its {average.num_gradients} workers; {_since(own)}. Something but averages has changed them, "
                "or this worker has another optimizer, another schedule or other hardware. Start it again, so that it "
                "takes the state of another one",
                code="GS_WEIGHTS_DIFFER",
            )
        if different.keys() != self._different:
            self._log(step, list(different.values()))
        self._different = frozenset(different)

    def _log(self, step: int, different: Sequence[DifferentWorker]) -> None:
        if not different:
            _log.info("training run %r: at step %d, all workers have equal parameters again", self._run, step)
            return
        more = len(different) - _NUM_NAMED
        named = "; ".join(f"{each.worker_id!r} ({_since(each)})" for each in different[:_NUM_NAMED])
        _log.warning(
            "training run %r: at step %d, these workers have other parameters than most: %s%s. Something but averages "
            "has changed them, or they have another optimizer, another schedule or other hardware",
            self._run,
            step,
            named,
            f" and {more} more" if more > 0 else "",
        )


def _usual(specs: Sequence[ArrayLike | DenseSpec]) -> int:
    num_bytes = 0
    for spec in specs:
        described: Any = spec if hasattr(spec, "dtype") and hasattr(spec, "shape") else np.asarray(spec)
        num_bytes += math.prod(described.shape or ()) * as_dtype(described.dtype, _PARAMETERS).itemsize
    return min(max(_LEAST, -(-num_bytes // _BYTES_PER_STEP)), _MOST)


def _since(worker: DifferentWorker) -> str:
    return "never equal so far" if worker.equal_at is None else f"equal at step {worker.equal_at}"
