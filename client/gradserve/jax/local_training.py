"""DiLoCo and LocalSGD for JAX: workers that train by themselves, and synchronize every so many steps."""

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self, Unpack

import jax
import numpy as np
from numpy.typing import NDArray

from gradserve import codecs, optim
from gradserve.client import Client
from gradserve.conversion.plain import as_flag
from gradserve.data import Batches
from gradserve.jax.leaves import PyTree, leaves_of, placed_like, to_host
from gradserve.training.diloco.plan import OnFailure, Plan, RunOptions, Weight, fragments_of
from gradserve.training.diloco.worker import NESTEROV, DilocoWorker, IfExists, begin_diloco
from gradserve_protocol.argument import Argument


def diloco(
    client: Client,
    *,
    sync_every: int,
    outer: optim.Optimizer = NESTEROV,
    name: str,
    num_required: int,
    fragments: int | Sequence[Sequence[str]] | None = None,
    fragment_sync_delay: int = 0,
    fragment_update_alpha: float = 0.0,
    weight: Weight = "steps",
    codec: codecs.Codec | str | None = None,
    codec_down: codecs.Codec | str | None = None,
    on_failure: OnFailure | None = None,
    if_exists: IfExists = "join",
    worker_id: str | None = None,
    timeout: float | None = None,
    container: str = "",
    data: Batches[Any] | None = None,
    **options: Unpack[RunOptions],
) -> "DiLoCo":
    """Lets a worker train by itself, and synchronizes its parameters with other workers every `sync_every` steps.

        with gradserve.jax.diloco(client, sync_every=100, name="llm", num_required=4) as diloco:
            params = diloco.init(params)
            for batch in batches:
                params, opt_state = train_step(params, opt_state, batch)  # compiled or not
                params = diloco.sync(params)

    The server holds the parameters. `sync` counts a step, and with every `sync_every`-th it sends what has changed
    since the last time, waits for the others, and returns the version that the outer optimizer has made of the mean. A
    worker that joins later, or is started again, begins with the newest version.

    If a synchronization fails, as the network or too many workers are gone, training goes on; see `on_failure`. An
    update that comes too late for its round is dropped, and the worker goes on from the newest version, unless
    `max_staleness` lets it count.

    Args:
        client: The client, which must stay open.
        sync_every: The number of steps between two synchronizations of a leaf. The same for all workers.
        outer: The optimizer on the server, of `gradserve.optim`, which takes the mean of the updates for a gradient.
            Only that of the worker which creates the run counts; others log a warning if theirs differs.
            `gradserve.optim.from_optax` translates Optax's. LocalSGD is `SGD(1.0)`: the mean of the parameters.
        name: The name of the run.
        num_required: The number of updates that end a round: the number of workers, or fewer if some may be slow.
        fragments: Parts that are synchronized in turn, every `sync_every / n` steps one of them: their number n, by
            which leaves are divided by size; or a list of lists of names, as `leaves_of` has them. None: all at once.
        fragment_sync_delay: The steps between taking an update and returning the version that it led to, in which
            training goes on beside the transfer. Less than `sync_every`.
        fragment_update_alpha: The part of the local values that stays when a version is loaded, from 0 to 1.
        weight: The weight of an update in the mean: "steps", the number of its steps; "tokens", those that `count` was
            told; "equal", 1; or a function of both, tokens and steps.
        codec: How updates travel, of `gradserve.codecs` or its name, such as "int4": with fewer bytes and some error,
            which comes with the next updates. None: as they are.
        codec_down: How versions travel: "bf16" or "int8" are good beginnings. None: as they are.
        on_failure: What happens when a synchronization fails: "continue", training goes on, and the work is in a later
            update; "reset", the worker goes back to the version that it had last. None: "continue"; with `data`,
            "reset".
        if_exists: What to do if the run has versions: "join" it, or raise an "error".
        worker_id: This worker's id, different from that of every other worker. None: that of
            GRADSERVE_WORKER_ID, or a new one.
        timeout: The longest wait for other workers, in seconds. None: the client's timeout. math.inf: no limit.
        container: The namespace of the name.
        data: The batches of this worker, made by `gradserve.data`, if the run shares them out: each sample is in one
            update that counts, once per epoch. Its batches_per_step is `sync_every`, or a multiple of it if gradients
            are accumulated. The same for all. Not with several fragments, delay or mixing, or max_staleness.
        **options: Further arguments of `Client.parameters`: min_required, grace, deadline, max_staleness,
            deterministic, durability, and others.

    Raises:
        InvalidArgumentError: An argument is not valid.
    """
    if not isinstance(outer, optim.Optimizer):
        raise Argument("outer").error("an optimizer of gradserve.optim, as from_optax makes it,", outer)
    plan = partial(
        Plan,
        sync_every,
        delay=fragment_sync_delay,
        alpha=fragment_update_alpha,
        weight=weight,
        on_failure=on_failure,
        codec=codec,
        codec_down=codec_down,
        data=data,
    )

    def begin(leaves: Mapping[str, Any]) -> DilocoWorker:
        sizes = {key: np.size(each) * jax.numpy.result_type(each).itemsize for key, each in leaves.items()}
        parts = fragments_of(sizes, fragments)
        return begin_diloco(
            client,
            [{key: leaves[key] for key in names} for names in parts],
            plan=plan(len(parts)),
            name=name,
            num_required=num_required,
            outer_optimizer=outer,
            to_framework=np.asarray,
            worker_id=worker_id,
            timeout=timeout,
            container=container,
            if_exists=if_exists,
            **options,
        )

    plan(1)  # which checks all but the number of fragments
    return DiLoCo(begin)


class DiLoCo:
    """A worker's part in a run, made by `diloco`. A context manager, though nothing of it has to be closed."""

    def __init__(self, begin: Any) -> None:
        """The function finds or creates the parameters of leaves by name."""
        self._begin = begin
        self._begun: DilocoWorker | None = None

    @property
    def step(self) -> int:
        """The number of inner steps of the run behind the parameters: where the schedule of a joiner has to begin."""
        return self._worker.step

    @property
    def version(self) -> int:
        """The step of the version that was loaded last; of several fragments, the least."""
        return self._worker.version

    @property
    def worker_id(self) -> str:
        """This worker's id."""
        return self._worker.worker_id

    @property
    def num_failed(self) -> int:
        """The number of synchronizations that have failed since the last one that did not."""
        return self._worker.num_failed

    def init(self, params: PyTree) -> PyTree:
        """Returns the parameters to begin with: those of the run, or `params` for a new one.

        Args:
            params: A pytree of floating-point arrays.

        Raises:
            AlreadyExistsError: Another worker of the run has another tree, other fragments or another sync_every; or
                the run has versions, with if_exists="error".
            GradserveError: The server cannot be reached, or refuses.
        """
        self._begun = self._begin(leaves_of(params))
        return _replaced(params, self._begun.values())

    def count(self, *, tokens: int) -> None:
        """Counts tokens of the present step, before `sync`: the weight of the update if it goes by tokens."""
        self._worker.count(tokens)

    def report(self, **metrics: float) -> None:
        """Notes what was measured in the present step, before `sync`: `report(loss=loss.item())`.

        The next update has the means since the one before it, the rounds have the means of all workers, and the status
        page and Prometheus show those; see `Parameters.push`.
        """
        self._worker.report(metrics)

    def sync(self, params: PyTree, *, now: bool = False) -> PyTree:
        """Counts a step that was taken, and returns the parameters to go on with. Outside of compiled functions.

        Args:
            params: The parameters after the step.
            now: Whether to count no step, but to synchronize all leaves with what was done since the last time: for the
                end of a training whose steps `sync_every` does not divide. All workers have to do it.

        Returns:
            The same leaves, or in steps that synchronize others, on the same devices.

        Raises:
            InvalidArgumentError: Nothing was counted for weight="tokens", or a value is not finite.
            AbortedError: The run was deleted.
            GradserveError: See `Parameters.push_pull`. Not for DeadlineExceededError, UnavailableError and
                ResourceExhaustedError, after which training goes on: a warning is logged.
        """
        worker, local = self._worker, _Local(params)
        is_now = as_flag(now, Argument("now"))
        return _replaced(params, worker.synchronize(local) if is_now else worker.take_step(local))

    def finish(self, params: PyTree) -> PyTree:
        """Waits for synchronizations under way, which only a delay leaves; returns the parameters to go on with."""
        return _replaced(params, self._worker.finish(_Local(params)))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._begun is not None:
            self._begun.close()

    @property
    def _worker(self) -> DilocoWorker:
        if self._begun is None:
            raise RuntimeError("DiLoCo has not begun: call params = diloco.init(params) first")
        return self._begun


class _Local:
    """The present values of some leaves of a pytree, on the host."""

    def __init__(self, params: PyTree) -> None:
        self._params = params

    def __call__(self, names: Collection[str]) -> dict[str, NDArray[Any]]:
        leaves = leaves_of(self._params)
        return to_host({name: leaves[name] for name in names})


def _replaced(params: PyTree, values: Mapping[str, NDArray[Any]]) -> PyTree:
    """Returns a pytree with some leaves replaced."""
    if not values:
        return params
    leaves = leaves_of(params)
    made = [placed_like(leaf, values[name]) if name in values else leaf for name, leaf in leaves.items()]
    return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(params), made)
