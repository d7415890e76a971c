"""The state of a training, as one worker gives it to another: weights, buffers, and what the optimizer remembers.

Names begin with what a tensor is, so workers with other frameworks can read what they have, too.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from gradserve.errors import InvalidArgumentError
from gradserve.torch.tensors import tensor_of
from gradserve.training import State

_PARAMETERS, _BUFFERS, _OPTIMIZER = "parameters/", "buffers/", "optimizer/"
_OPTIMIZER_METADATA, _SCHEDULER_METADATA = "torch.optimizer", "torch.scheduler"


class TrainingState:
    """The state of a model, and of its optimizer and scheduler if there are any."""

    def __init__(self, model: torch.nn.Module, optimizer: Any = None, scheduler: Any = None) -> None:
        self._model = model
        self._optimizer = optimizer
        self._scheduler = scheduler

    def captured(self) -> State:
        """Returns the state; tensors of the CPU are in the memory where they are.

        Raises:
            InvalidArgumentError: The optimizer or the scheduler remembers something that is neither a tensor nor
                numbers and texts.
        """
        tensors = {name: _on_host(each) for name, each in _tensors_of(self._model)}
        metadata: dict[str, Any] = {}
        if self._optimizer is not None:
            state = self._optimizer.state_dict()
            metadata[_OPTIMIZER_METADATA] = {
                "state": {
                    str(key): _taken_apart(each, f"{_OPTIMIZER}{key}/", tensors) for key, each in state["state"].items()
                },
                "groups": [
                    _taken_apart(group, f"{_OPTIMIZER}group-{index}/", tensors)
                    for index, group in enumerate(state["param_groups"])
                ],
            }
        if self._scheduler is not None:
            metadata[_SCHEDULER_METADATA] = _plain(self._scheduler.state_dict(), "the scheduler's state")
        return State(tensors, metadata)

    def load(self, state: State) -> None:
        """Takes over a state that another worker has captured.

        Raises:
            InvalidArgumentError: It is of another model, or of another optimizer.
        """
        own = dict(_tensors_of(self._model))
        given = {name: np.asarray(each) for name, each in state.tensors.items() if not name.startswith(_OPTIMIZER)}
        if given.keys() != own.keys():
            raise _different("parameters and buffers", sorted(own), sorted(given), "model")
        for name, tensor in own.items():
            if tuple(tensor.shape) != given[name].shape:
                raise _different(f"shape of {name!r}", list(tensor.shape), list(given[name].shape), "model")
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(tensor_of(given[name]))
        if self._optimizer is not None:
            self._load_optimizer(state)
        if self._scheduler is not None and _SCHEDULER_METADATA in state.metadata:
            self._scheduler.load_state_dict(dict(state.metadata[_SCHEDULER_METADATA]))

    def _load_optimizer(self, state: State) -> None:
        metadata = state.metadata.get(_OPTIMIZER_METADATA)
        if metadata is None:
            remembered = sorted(name for name in state.tensors if name.startswith(_OPTIMIZER))
            if remembered:
                raise _different("optimizer", "one of PyTorch", remembered, "optimizer")
            return  # a worker with another framework, whose optimizer remembers nothing
        own = self._optimizer.state_dict()["param_groups"]
        groups = [
            _put_together(group, f"{_OPTIMIZER}group-{index}/", state.tensors)
            for index, group in enumerate(metadata["groups"])
        ]
        shown = [[{"keys": sorted(group), "params": group["params"]} for group in each] for each in (own, groups)]
        if shown[0] != shown[1]:
            raise _different("grouping of parameters in the optimizer", shown[0], shown[1], "optimizer")
        for mine, theirs in zip(own, groups, strict=True):
            theirs.update({key: tuple(theirs[key]) for key, value in mine.items() if isinstance(value, tuple)})
        remembered_by = {
            int(key): _put_together(each, f"{_OPTIMIZER}{key}/", state.tensors)
            for key, each in metadata["state"].items()
        }
        self._optimizer.load_state_dict({"state": remembered_by, "param_groups": groups})


def _tensors_of(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in model.named_parameters():
        yield _PARAMETERS + name, parameter
    for name, buffer in model.named_buffers():
        yield _BUFFERS + name, buffer


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu()


def _taken_apart(values: Mapping[str, Any], prefix: str, tensors: dict[str, Any]) -> dict[str, Any]:
    """Returns the values that are not tensors; adds the others to `tensors`."""
    others = {}
    for key, value in values.items():
        if isinstance(value, torch.Tensor):
            tensors[prefix + key] = _on_host(value)
        else:
            others[key] = _plain(value, f"{key!r} of the optimizer")
    return others


def _put_together(values: Mapping[str, Any], prefix: str, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what `_taken_apart` was given."""
    found = {name.removeprefix(prefix): each for name, each in tensors.items() if name.startswith(prefix)}
    return dict(values) | {key: tensor_of(np.asarray(each)).clone() for key, each in found.items()}


def _plain(value: Any, name: str) -> Any:
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError):
        raise InvalidArgumentError(
            f"{name} is {value!r}, which cannot be sent to a worker that joins; expected tensors, numbers and texts. "
            "Use an optimizer or a scheduler that remembers nothing else",
            field="optimizer",
        ) from None


def _different(what: str, own: object, given: object, field: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"the state of another worker has another {what}: expected {own}, got {given}. All workers of a run need the "
        "same model and optimizer",
        field=field,
    )
