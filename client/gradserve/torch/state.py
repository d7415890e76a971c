"""The state of a training, as one worker gives it to another: weights, buffers, and what the optimizer remembers.

Names begin with what a tensor is, so workers with other frameworks can read what they have, too.
"""

import warnings
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
import torch

from gradserve.errors import InvalidArgumentError
from gradserve.torch.nested import Arrays, as_given, on_host, plain_parts, put_together, taken_apart
from gradserve.torch.tensors import tensor_of
from gradserve.torch.trained import named_buffers, named_parameters, tensors_left_out
from gradserve.training import State

_PARAMETERS, _BUFFERS = "parameters/", "buffers/"
_OPTIMIZER, _SCHEDULER = "optimizer", "scheduler"
_MOST_NAMES = 5
_OPTIMIZER_METADATA, _SCHEDULER_METADATA = "torch.optimizer", "torch.scheduler"


class TrainingState:
    """The state of a model, and of its optimizer and scheduler if there are any."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Any = None,
        scheduler: Any = None,
        *,
        send_frozen: bool = True,
        leave_out: Collection[str] = (),
    ) -> None:
        """See `average_gradients`; the model is not in a wrapper.

        Raises:
            InvalidArgumentError: `leave_out` does not name frozen parameters and buffers.
        """
        self._left_out = tensors_left_out(model, send_frozen, leave_out)
        self._model = model
        self._optimizer = optimizer
        self._scheduler = scheduler

    def captured(self) -> State:
        """Returns the state; tensors of the CPU are in the memory where they are.

        Raises:
            InvalidArgumentError: A tensor, or something that the optimizer or the scheduler remembers, cannot travel.
        """
        tensors: Arrays = {name: on_host(name, each) for name, each in self._tensors()}
        metadata: dict[str, Any] = {}
        if self._optimizer is not None:
            state = self._optimizer.state_dict()
            metadata[_OPTIMIZER_METADATA] = {
                "state": taken_apart(dict(state["state"]), _OPTIMIZER, tensors),
                "groups": taken_apart(list(state["param_groups"]), f"{_OPTIMIZER}.groups", tensors),
            }
        if self._scheduler is not None:
            metadata[_SCHEDULER_METADATA] = taken_apart(self._scheduler.state_dict(), _SCHEDULER, tensors)
        return State(tensors, metadata)

    def load(self, state: State) -> None:
        """Takes over a state that another worker has captured.

        Raises:
            InvalidArgumentError: It is of another model, or of another optimizer.
        """
        own = dict(self._tensors())
        others = (f"{_OPTIMIZER}/", f"{_SCHEDULER}/")
        given = {name: np.asarray(each) for name, each in state.tensors.items() if not name.startswith(others)}
        if given.keys() != own.keys():
            missing, more = sorted(own.keys() - given.keys()), sorted(given.keys() - own.keys())
            raise _different("set of parameters and buffers", missing[:_MOST_NAMES], more[:_MOST_NAMES], "model")
        for name, tensor in own.items():
            if tuple(tensor.shape) != given[name].shape:
                raise _different(f"shape of {name!r}", list(tensor.shape), list(given[name].shape), "model")
            dtype = str(tensor.dtype).removeprefix("torch.")
            if dtype != given[name].dtype.name:
                raise _different(f"dtype of {name!r}", dtype, given[name].dtype.name, "model")
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(tensor_of(given[name]))
        if self._optimizer is not None:
            self._load_optimizer(state)
        if self._scheduler is not None and _SCHEDULER_METADATA in state.metadata:
            self._scheduler.load_state_dict(put_together(state.metadata[_SCHEDULER_METADATA], state.tensors))

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Returns the plain tensors of the model that travel, by name."""
        for prefix, tensors in (
            (_PARAMETERS, named_parameters(self._model)),
            (_BUFFERS, named_buffers(self._model)),
        ):
            for name, each in tensors:
                if name not in self._left_out:
                    yield from plain_parts(prefix + name, each)

    def _load_optimizer(self, state: State) -> None:
        metadata = state.metadata.get(_OPTIMIZER_METADATA)
        if metadata is None:
            remembered = sorted(name for name in state.tensors if name.startswith(f"{_OPTIMIZER}/"))
            if remembered:
                raise _different("optimizer", "one of PyTorch", remembered, "optimizer")
            return  # a worker with another framework, whose optimizer remembers nothing
        own = self._optimizer.state_dict()["param_groups"]
        groups = put_together(metadata["groups"], state.tensors)
        shown = [[{"keys": sorted(group), "params": group["params"]} for group in each] for each in (own, groups)]
        if shown[0] != shown[1]:
            raise _different("grouping of parameters in the optimizer", shown[0], shown[1], "optimizer")
        remembered_by = put_together(metadata["state"], state.tensors)
        numbers = [number for group in groups for number in group["params"]]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Casting complex values to real")  # which is undone below
            self._optimizer.load_state_dict({"state": remembered_by, "param_groups": groups})
        parameters = (each for group in self._optimizer.param_groups for each in group["params"])
        for number, parameter in zip(numbers, parameters, strict=True):
            if number in remembered_by and parameter in self._optimizer.state:
                loaded = self._optimizer.state[parameter]
                self._optimizer.state[parameter] = as_given(loaded, remembered_by[number])


def _different(what: str, own: object, given: object, field: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"the state of another worker has another {what}: expected {own}, got {given}. All workers of a run need the "
        "same model and optimizer, and the same send_frozen and leave_out",
        field=field,
    )
