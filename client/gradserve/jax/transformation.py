"""An Optax transformation that averages gradients over workers."""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import io_callback

from gradserve.client import Client
from gradserve.data import Batches
from gradserve.jax.leaves import PyTree, leaves_of, place_of
from gradserve.jax.training_state import (
    AverageByState,
    check_optimizer,
    restored,
    settings_of,
    state_of,
    step_of,
    with_step,
)
from gradserve.results import Average, DenseSpec
from gradserve.training import State, Worker
from gradserve.training.agreement import Compared
from gradserve_protocol.errors import GradserveError, InvalidArgumentError

_COPYING_SECONDS = 5.0
"""For how long each step is copied after somebody has asked for a state: long enough to be asked again."""
NewWorker: TypeAlias = Callable[[dict[str, DenseSpec], dict[str, str], Compared], Worker]
"""Makes a worker, given its parameters, what its optimizer's state says about the optimizer, and what returns the
parameters that are compared with those of others."""


@dataclass(frozen=True)
class _Current:
    """The parameters and state of this worker at the end of a step."""

    step: int
    params: PyTree
    opt_state: PyTree

    @property
    def is_given_away(self) -> bool:
        """True once their memory belongs to a compiled step."""
        leaves = jax.tree.leaves((self.params, self.opt_state))
        return any(isinstance(each, jax.Array) and each.is_deleted() for each in leaves)

    def for_others(self, *, is_copy: bool) -> State:
        return state_of(self.params, self.opt_state, is_copy=is_copy)


class AverageBy(optax.GradientTransformationExtraArgs):
    """An Optax transformation that replaces gradients by their average over workers; `average_by` makes it.

    `begin` comes first, and `catch_up` after each step. `update` waits until the round is full. It can be used inside
    `jax.jit` and `jax.lax.scan`, where it is an ordered callback on the host, and outside. Errors inside are
    JaxRuntimeErrors whose message ends with ours. Not for use by several threads at once.
    """

    def __new__(cls, worker: NewWorker) -> Self:
        """Makes the transformation; `average_by` describes it."""
        del worker
        self: Self = super().__new__(cls, _init, lambda *given, **more: self._update(*given, **more))
        return self

    def __init__(self, worker: NewWorker) -> None:
        """Keeps the function that makes the worker once the parameters are known."""
        self._new_worker = worker
        self._worker: Worker | None = None
        self._dtypes: Mapping[str, Any] = {}
        self._missed: deque[Average] = deque()
        """Averages that are still to be applied."""
        self._newer: State | None = None
        """The state to go on from, if there are no such averages any more."""
        self._current: _Current | None = None
        self._copy: State | Exception | None = None
        self._copies_end = -math.inf
        self._compared: tuple[int, dict[str, Any]] | None = None
        """A copy of parameters that are to be compared with those of others, and their step."""
        self._compiled: tuple[Any, Any] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if self._worker is not None:
            self._worker.__exit__(kind, error, traceback)

    @property
    def worker_id(self) -> str:
        """The id of this worker."""
        return self._begun().worker_id

    @property
    def step(self) -> int:
        """The step of this worker's parameters: the number of averages that were applied to them."""
        return self._begun().step - len(self._missed)

    def begin(self, params: PyTree, opt_state: PyTree) -> tuple[PyTree, PyTree]:
        """Joins the training run, and returns what this worker begins with. Blocks until it has that.

        The parameters of the first worker become those of all. A worker that comes later gets the parameters and the
        state of the optimizer of one that is training. If `opt_state` is of a later step than 0, as that of a
        checkpoint is, the worker keeps what it has, and then applies the averages that it has missed.

        Args:
            params: The parameters, a pytree of floating point arrays.
            opt_state: The result of `optimizer.init(params)`, with the optimizer that has this transformation in it, or
                what a checkpoint has.

        Returns:
            The parameters and the state of the optimizer, of the same structure and on the same devices.

        Raises:
            InvalidArgumentError: `opt_state` does not have the state of this transformation; or this is inside a
                transformation that hides parameters or drops steps, such as optax.MultiSteps, which is named; or a leaf
                has a dtype that cannot be averaged; or the state of the others has other leaves.
            AlreadyExistsError: The name is taken by a run with another model, another `num_required`, another optimizer
                or other settings: the message has both values.
            DeadlineExceededError: Other workers have trained, but none has sent its state in time.
        """
        if self._worker is not None:
            raise InvalidArgumentError("expected one call of begin, got a second one; make another average_by")
        step = step_of(opt_state)
        check_optimizer(opt_state)
        leaves = leaves_of(params)
        self._dtypes = {name: _floating_dtype(name, leaf) for name, leaf in leaves.items()}
        worker = self._new_worker(
            {name: DenseSpec(self._dtypes[name], np.shape(leaf)) for name, leaf in leaves.items()},
            settings_of(opt_state),
            self._parameters_to_compare,
        )
        try:
            self._current = _Current(worker.step, params, opt_state)
            self._worker = worker
            newer = worker.begin(self._state_for_others, start_step=step or None)
            if newer is not None:
                params, opt_state = restored(newer, params, opt_state)
        except BaseException:
            self._worker = None
            worker.close()
            raise
        opt_state = with_step(opt_state, worker.step)
        self._current = _Current(worker.step, params, opt_state)
        self._compared = self._noted(params) if worker.compares_at(self.step) else None
        return params, opt_state

    def catch_up(self, optimizer: Any, params: PyTree, opt_state: PyTree) -> tuple[PyTree, PyTree]:
        """Applies the averages that this worker has missed because it was late: to be called after each step.

        It is also what lets others join: it notes the state of this worker for them. It waits for the step to end, and
        costs nothing else for a worker that was in time. Not for use inside `jax.jit`.

        Without it, a late worker applies one of the averages that it has missed with each update, and drops the
        gradients.

        Args:
            optimizer: The optimizer that has this transformation in it.
            params: The parameters after the step.
            opt_state: The state of the optimizer after the step.

        Returns:
            The parameters and the state of the optimizer at the newest step that this worker knows of.

        Raises:
            InvalidArgumentError: The state of another worker was needed, and has other leaves.
        """
        worker = self._begun()
        jax.block_until_ready(opt_state)
        if self._newer is not None:
            params, opt_state = restored(self._newer, params, opt_state)
            opt_state, self._newer = with_step(opt_state, worker.step), None
        while self._missed:
            params, opt_state = jax.block_until_ready(self._applying_one(optimizer)(params, opt_state))
        self._current = _Current(self.step, params, opt_state)
        self._compared = self._noted(params) if worker.compares_at(self.step) else None
        self._copy = self._copied(self._current) if time.monotonic() < self._copies_end else None
        return params, opt_state

    def close(self) -> None:
        """Leaves the run, in which the others go on. Can be called again.

        A `with` block that ends without an error also leaves the state of this worker there for late ones.
        """
        if self._worker is not None:
            self._worker.close()

    def _update(
        self, updates: PyTree, state: AverageByState, _params: PyTree = None, **_: object
    ) -> tuple[PyTree, AverageByState]:
        leaves = leaves_of(updates)
        gradients = [jnp.asarray(each) for each in leaves.values()]

        def exchange(step: Any, *arrays: Any) -> tuple[Any, ...]:
            return self._next(tuple(leaves), int(step), arrays)

        if any(isinstance(each, jax.core.Tracer) for each in (state.step, *gradients)):
            shapes = tuple(jax.ShapeDtypeStruct(each.shape, each.dtype) for each in gradients)
            results = (jax.ShapeDtypeStruct((), jnp.int32), *shapes)
            step, *averages = io_callback(_with_notes(exchange), results, state.step, *gradients, ordered=True)
        else:
            step, *new = exchange(state.step, *gradients)
            averages = [jax.device_put(each, place_of(old)) for each, old in zip(new, gradients, strict=True)]
        averaged = jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(updates), averages)
        return averaged, AverageByState(jnp.asarray(step))

    def _next(self, names: Sequence[str], step: int, gradients: Sequence[Any]) -> tuple[Any, ...]:
        """Returns the next step and its average. A late worker gets one of those that it has missed with each call."""
        worker = self._begun()
        if self._newer is not None:
            raise InvalidArgumentError(
                "this worker was so late that the averages it has missed are no longer kept, and has got the state of "
                "another worker, which catch_up loads: after each step, call "
                "params, opt_state = averaging.catch_up(optimizer, params, opt_state)"
            )
        if step != self.step:
            raise InvalidArgumentError(
                f"expected the state of the optimizer of step {self.step}, got that of step {step}; each is for one "
                "update, by the whole program and not by each of its devices, and that of a checkpoint goes into begin"
            )
        self._check(dict(zip(names, gradients, strict=True)))
        if not self._missed:
            advance = worker.exchange(dict(zip(names, gradients, strict=True)))
            self._missed.extend(advance.averages)
            self._newer = advance.state
        if self._newer is not None:
            return np.int32(step), *map(np.zeros_like, gradients)
        average = self._missed.popleft()
        return np.int32(step + 1), *(average[name] for name in names)

    def _check(self, gradients: Mapping[str, Any]) -> None:
        """Refuses gradients of other parameters, and such as would be rounded otherwise than those of other workers."""
        if gradients.keys() != self._dtypes.keys():
            missing, unknown = self._dtypes.keys() - gradients.keys(), gradients.keys() - self._dtypes.keys()
            raise InvalidArgumentError(
                "expected a gradient of each parameter that begin was given, and of no other, got none of "
                f"{sorted(missing)} and one of {sorted(unknown)}; pass zeros for a parameter without a gradient, or "
                "leave it out in begin and optimizer.init, too. If average_by is inside a transformation that hides or "
                "reshapes parameters, such as optax.flatten, put it before that"
            )
        for name, gradient in gradients.items():
            if gradient.dtype != self._dtypes[name]:
                raise InvalidArgumentError(
                    f"expected the gradient of {name!r} in {self._dtypes[name]}, the dtype of the parameter, got "
                    f"{gradient.dtype}; jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params) converts all"
                )

    def _applying_one(self, optimizer: Any) -> Any:
        """Returns a compiled step that applies the next average that was missed, in place of a gradient."""
        if self._compiled is None or self._compiled[0] is not optimizer:

            def step(params: PyTree, opt_state: PyTree) -> tuple[PyTree, PyTree]:
                updates, opt_state = optimizer.update(jax.tree.map(jnp.zeros_like, params), opt_state, params)
                return optax.apply_updates(params, updates), opt_state

            self._compiled = optimizer, jax.jit(step)
        return self._compiled[1]

    @staticmethod
    def _copied(current: _Current) -> State | Exception:
        """Returns a copy for others, or what was wrong, which is theirs to know, and no error of this step."""
        try:
            return current.for_others(is_copy=True)
        except Exception as error:
            return error

    def _state_for_others(self) -> State | None:
        """Returns the state at this worker's step; None if it is not at hand now, but may be at the next step."""
        current = self._current
        if current is None or current.step != self._begun().step:
            return None
        if self._copy is not None:
            self._copies_end = -math.inf
            if isinstance(self._copy, Exception):
                raise self._copy
            return self._copy
        if current.is_given_away:
            self._copies_end = time.monotonic() + _COPYING_SECONDS
            return None
        return current.for_others(is_copy=False)

    def _noted(self, params: PyTree) -> tuple[int, dict[str, Any]]:
        """Returns a copy of parameters with their step: a compiled step may take over their memory."""
        return self.step, {name: np.array(leaf) for name, leaf in leaves_of(params).items()}

    def _parameters_to_compare(self) -> dict[str, Any] | None:
        """Returns the parameters at this worker's step; None if `catch_up` was not called with them."""
        noted, self._compared = self._compared, None
        return noted[1] if noted is not None and noted[0] == self._begun().step else None

    def _begun(self) -> Worker:
        if self._worker is None:
            raise InvalidArgumentError(
                "expected begin before the first update: "
                "params, opt_state = averaging.begin(params, optimizer.init(params))"
            )
        return self._worker


def _init(_params: PyTree) -> AverageByState:
    return AverageByState(jnp.zeros((), jnp.int32))


def _floating_dtype(name: str, leaf: Any) -> Any:
    dtype = jnp.result_type(leaf)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise InvalidArgumentError(
            f"expected floating point numbers as parameters, got {dtype} for {name!r}; give begin and optimizer.init "
            "only what is trained"
        )
    return dtype


def _with_notes(call: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a call whose errors have their notes in the message, of which alone JAX tells."""

    def noted(*arrays: Any) -> Any:
        try:
            return call(*arrays)
        except GradserveError as error:
            error.message = "\n".join([error.message, *getattr(error, "__notes__", ())])
            raise

    return noted


def average_by(
    client: Client,
    *,
    num_required: int,
    name: str,
    worker_id: str | None = None,
    container: str = "",
    timeout: float | None = None,
    keep_averages: int = 4,
    deterministic: bool = False,
    refuse_non_finite: bool = True,
    durability: str | None = None,
    idle_lease: float | None = None,
    settings: Mapping[str, str] | None = None,
    if_exists: Literal["join", "new", "error"] = "join",
    compare_every: int | None = None,
    data: Batches[Any] | None = None,
) -> AverageBy:
    """Returns an Optax transformation that replaces gradients by their average over the workers of a training run.

    averaging = gradserve.jax.average_by(client, num_required=4, name="digits")
    optimizer = optax.chain(averaging, optax.adam(1e-3))
    params, opt_state = averaging.begin(params, optimizer.init(params))

    All workers apply the same averages in the same order to the same parameters: so they have equal parameters at equal
    steps. A gradient is named by the path to it ("layers/0/w"), as in `client.gradient_accumulator(params)`; workers
    with other frameworks use these names.

    Args:
        client: The client of the server, which stays open for at least as long.
        num_required: The number of gradients in an average: the number of workers, or fewer if some are backups, or may
            die. The same for all workers.
        name: The name of the training run: all workers with the same name and container train together.
        worker_id: An id that no other worker of the run has. None: that of GRADSERVE_WORKER_ID, or a new one.
        container: The namespace of the name.
        timeout: Seconds to wait for a round, or for the state of another worker; and for a server that is gone, unless
            GRADSERVE_RESTART_PATIENCE is set. None: the client's timeout.
        keep_averages: The number of past rounds whose averages the server keeps for late workers. A worker that is
            later gets the state of another one.
        deterministic: Whether the same gradients give the same bits in whatever order they arrive.
        refuse_non_finite: Whether gradients with infinities or NaN are refused, with an InvalidArgumentError that names
            the parameter. Otherwise they reach the weights of all workers.
        durability: What the server keeps of the run on its disk, as in `Client.gradient_accumulator`. None: what the
            server was started with.
        idle_lease: Seconds after its last use by a worker at which the run is deleted. None: never.
        settings: What all workers must have been started with, as texts by name, such as {"learning rate": "0.1"}:
            Optax keeps that in closures. The transformations that the optimizer is made of are compared anyway, and the
            values of `optax.inject_hyperparams`.
        if_exists: What to do if there is a run of this name that has taken steps. "join": go on with its state. "new":
            the same if any of its workers is there; otherwise delete it and start over. "error": raise
            AlreadyExistsError.
        compare_every: Compare the parameters of all workers, bit by bit, at every step that this divides: a digest of
            those that `catch_up` was given travels with the next gradients, and the server compares. A worker whose
            parameters differ from those of most gets an error out of the update, and the others log it. None: every 10
            steps, or up to 1,000 if there are many parameters, and a difference is only logged. 0: never.
        data: The batches of this worker, made by `gradserve.data`, if the run shares them out: each sample counts once
            per epoch, however workers come and go. The same for all workers. `catch_up` must follow each step.
    """

    def worker(parameters: dict[str, DenseSpec], of_optimizer: dict[str, str], compared: Compared) -> Worker:
        return Worker(
            client,
            parameters,
            name=name,
            num_required=num_required,
            worker_id=worker_id,
            container=container,
            timeout=timeout,
            keep_averages=keep_averages,
            deterministic=deterministic,
            refuse_non_finite=refuse_non_finite,
            durability=durability,
            idle_lease=idle_lease,
            if_exists=if_exists,
            compare_every=compare_every,
            compared=compared,
            settings={"jax": {**of_optimizer, **(settings or {})}},
            data=data,
        )

    return AverageBy(worker)
