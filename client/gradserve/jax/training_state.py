"""The state that workers of a training run send each other: parameters, and the state of the optimizer."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from gradserve.jax.leaves import PyTree, from_host, leaves_of, placed_like, to_host
from gradserve.training import State
from gradserve_protocol.errors import InvalidArgumentError

_PARAMETERS, _OPTIMIZER = "parameters", "optimizer"
_OTHER_MODEL = "all workers need the same model and the same optimizer"


class AverageByState(NamedTuple):
    """The part of the state of an optimizer that belongs to `average_by`.

    Attributes:
        step: int32, a scalar: the number of averages that have been applied, which is the step of the parameters.
    """

    step: jax.Array


def step_of(opt_state: PyTree) -> int:
    """Returns the step of the only AverageByState in the state of an optimizer.

    Raises:
        InvalidArgumentError: There is none, or there are several.
    """
    found = [each for each in jax.tree.leaves(opt_state, is_leaf=_is_own) if _is_own(each)]
    if len(found) != 1:
        raise InvalidArgumentError(
            f"expected the state of an optimizer with one average_by for opt_state, got one with {len(found)}; make it "
            "with optimizer.init(params), where optimizer = optax.chain(averaging, ...)",
            field="opt_state",
        )
    return int(found[0].step)


_WRAPPERS = {
    "MultiStepsState": (
        "MultiSteps",
        "it calls what it wraps for each part of a batch and drops the result; add up the gradients of the parts "
        "yourself and call update once, or put average_by before it, which averages each part: "
        "optax.chain(averaging, optax.MultiSteps(...))",
    ),
    "MaskedState": (
        "masked",
        "it hides parameters; put average_by before it: optax.chain(averaging, optax.masked(...))",
    ),
    "PartitionState": (
        "multi_transform",
        "it gives each transformation only some of the parameters; put average_by before it: "
        "optax.chain(averaging, optax.multi_transform(...))",
    ),
    "ConditionallyTransformState": (
        "conditionally_transform",
        "it leaves gradients as they are in other steps, so weights would differ; put average_by before it",
    ),
    "ConditionallyMaskState": ("conditionally_mask", "it drops steps of the run; put average_by before it"),
    "SAMState": ("contrib.sam", "it drops the steps in between; put average_by before it"),
}
"""Transformations that cannot contain average_by, by the type of their state: the name in Optax, and the reason."""
_BY_VALUE = {
    "ReduceLROnPlateauState": "contrib.reduce_on_plateau",
    "MomoState": "contrib.momo",
    "MomoAdamState": "contrib.momo_adam",
    "ScaleByBacktrackingLinesearchState": "scale_by_backtracking_linesearch",
    "ScaleByZoomLinesearchState": "scale_by_zoom_linesearch",
}
"""Transformations that use the loss of a worker's own batch, by the type of their state: the name in Optax."""


def check_optimizer(opt_state: PyTree) -> None:
    """Checks that an optimizer takes the same steps on all workers, and lets average_by see each of them.

    Raises:
        InvalidArgumentError: average_by is inside a transformation that does not, or the optimizer goes by the loss of
            a worker's own batch; the message names the transformation.
    """
    for node, around in _with_wrappers(opt_state, ()):
        if isinstance(node, AverageByState):
            for name in around:
                if name in _WRAPPERS:
                    wrapper, reason = _WRAPPERS[name]
                    raise InvalidArgumentError(
                        f"average_by cannot be inside optax.{wrapper}: {reason}", field="opt_state"
                    )
        elif type(node).__name__ in _BY_VALUE:
            raise InvalidArgumentError(
                f"optax.{_BY_VALUE[type(node).__name__]} goes by the loss of this worker's own batch, so the steps of "
                "workers would differ. Use a transformation that depends on gradients and the step alone",
                field="opt_state",
            )


def _with_wrappers(node: object, around: tuple[str, ...]) -> Iterator[tuple[object, tuple[str, ...]]]:
    """Yields the states in the state of an optimizer, each with the types of those around it."""
    yield node, around
    if isinstance(node, tuple | list | dict):
        for inner in node.values() if isinstance(node, dict) else node:
            yield from _with_wrappers(inner, (*around, type(node).__name__))


def with_step(opt_state: PyTree, step: int) -> PyTree:
    """Returns the state of an optimizer with another step."""

    def replaced(node: Any) -> Any:
        return AverageByState(placed_like(node.step, np.asarray(step, np.int32))) if _is_own(node) else node

    return jax.tree.map(replaced, opt_state, is_leaf=_is_own)


def settings_of(opt_state: PyTree) -> dict[str, str]:
    """Returns what the state of an optimizer says about the optimizer, as texts by name.

    That is of which transformations it is made, and at step 0 the values that `optax.inject_hyperparams` keeps there.
    All else is in closures of Optax, which cannot be compared.
    """
    found = {"optimizer": _structure(opt_state)}
    if step_of(opt_state) == 0:
        for path, leaf in jax.tree_util.tree_flatten_with_path(opt_state)[0]:
            names = [str(getattr(key, "name", getattr(key, "key", ""))) for key in path]
            if "hyperparams" in names[:-1] and np.size(leaf) == 1:
                found[f"{names[-1]} of the optimizer"] = str(np.asarray(leaf).item())
    return found


def state_of(params: PyTree, opt_state: PyTree, *, is_copy: bool) -> State:
    """Returns parameters and the state of an optimizer, without its step, as others can read them.

    Args:
        params: The parameters.
        opt_state: The state of the optimizer.
        is_copy: Whether the arrays are new; otherwise they share memory with these where that is in the host.

    Raises:
        InvalidArgumentError: A leaf is neither an array nor a number.
    """
    tensors = to_host(leaves_of(_parts(params, opt_state)))
    return State({name: each.copy() for name, each in tensors.items()} if is_copy else tensors)


def restored(state: State, params: PyTree, opt_state: PyTree) -> tuple[PyTree, PyTree]:
    """Returns the parameters and the state of the optimizer of another worker, in the structure of one's own.

    Args:
        state: The state of the other worker.
        params: One's own parameters.
        opt_state: The state of one's own optimizer.

    Raises:
        InvalidArgumentError: The other worker has other leaves.
    """
    own = _parts(params, opt_state)
    unknown = sorted(set(state.tensors) - set(leaves_of(own)))
    if unknown:
        raise InvalidArgumentError(
            f"the state of another worker has {unknown[0]!r}, this worker has not: {_OTHER_MODEL}"
        )
    arrays = {name: np.asarray(each) for name, each in state.tensors.items()}
    received = from_host(own, arrays, _OTHER_MODEL)
    opt_states = iter(jax.tree.leaves(received[_OPTIMIZER]))

    def filled(node: Any) -> Any:
        return node if _is_own(node) else next(opt_states)

    opt_state = jax.tree.map(filled, opt_state, is_leaf=_is_own)
    return received[_PARAMETERS], opt_state


def _is_own(node: object) -> bool:
    return isinstance(node, AverageByState)


def _parts(params: PyTree, opt_state: PyTree) -> dict[str, PyTree]:
    """Returns what workers have in common; None takes the place of the step."""
    others = jax.tree.map(lambda node: None if _is_own(node) else node, opt_state, is_leaf=_is_own)
    return {_PARAMETERS: params, _OPTIMIZER: others}


def _structure(node: object) -> str:
    """Returns the types of the states that the state of an optimizer consists of, in their order."""
    if isinstance(node, dict):
        node = tuple(node.values())
    if not isinstance(node, tuple):
        return ""
    inner = ", ".join(filter(None, map(_structure, node)))
    if type(node) is tuple:
        return f"({inner})" if inner else ""
    return f"{type(node).__name__}({inner})" if inner else type(node).__name__
