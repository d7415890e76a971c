"""The state of a training, as one worker gives it to another: weights, buffers, and what the optimizer remembers.

Names begin with what a tensor is, so workers with other frameworks can read what they have, too.
"""

import re
import warnings
from collections.abc import Collection, Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from gradserve.torch.parameters import named_buffers, named_parameters, tensors_left_out
from gradserve.torch.tensors import array_of, tensor_of
from gradserve.training import State
from gradserve.training.state import Json, as_json, class_named, from_json, title_of
from gradserve_protocol.errors import InvalidArgumentError

Arrays: TypeAlias = dict[str, NDArray[Any]]
_NAMES_IN_TORCH = (torch.dtype, torch.layout, torch.memory_format)
_MOST_NAMES = 5


def plain_parts(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Returns the plain tensors that hold the values of a tensor, by name: itself, unless it is a wrapper of others."""
    if _is_wrapper(tensor):
        for part in tensor.__tensor_flatten__()[0]:
            yield from plain_parts(f"{name}/{part}", getattr(tensor, part))
    else:
        yield name, tensor.detach().as_subclass(torch.Tensor)


def on_host(name: str, tensor: torch.Tensor) -> NDArray[Any]:
    """Returns a plain tensor as an array in the memory of the host, the same one if the tensor is there.

    Raises:
        InvalidArgumentError: It is not dense, has no memory, or has a dtype that cannot travel.
    """
    try:
        return array_of(tensor.detach().cpu().resolve_conj().resolve_neg())
    except (TypeError, RuntimeError, NotImplementedError) as error:
        raise InvalidArgumentError(
            f"{name} is a tensor of dtype {tensor.dtype}, layout {tensor.layout} and device {tensor.device}, which "
            f"cannot be sent to a worker that joins ({error}); expected a dense one of a dtype of numbers",
            field=name,
        ) from None


def taken_apart(value: Any, name: str, arrays: Arrays) -> Json:
    """Returns a value of any depth as JSON has it; adds the tensors in it to `arrays`.

    Args:
        value: Tensors, also of subclasses, generators of random numbers, and what `as_json` takes.
        name: What to call the value, in errors and in the names of its tensors.
        arrays: The tensors as arrays in the memory of the host, by name.

    Raises:
        InvalidArgumentError: It has something that cannot travel; the message names that.
    """

    def added(path: str, array: NDArray[Any]) -> str:
        title = re.sub(r"[^\w.-]+", "/", path).strip("/")
        while title in arrays:
            title += "+"
        arrays[title] = array
        return title

    def encode(value: Any, path: str) -> tuple[str, Json] | None:
        if not path.startswith(name):
            return None  # a key, which tensors cannot be
        if isinstance(value, torch.Tensor):
            return tensor_apart(value, path)
        if type(value) is np.ndarray and value.dtype.kind in "biufc":
            return "array of tensors", added(path, value)
        if isinstance(value, torch.Generator):
            return "generator", [value.device.type, added(path, array_of(value.get_state()))]
        if isinstance(value, torch.Size):
            return "size", list(value)
        if isinstance(value, _NAMES_IN_TORCH):
            return "name in torch", str(value).removeprefix("torch.")
        return None

    def tensor_apart(tensor: torch.Tensor, path: str) -> tuple[str, Json]:
        if type(tensor) is torch.Tensor:
            return "tensor", added(path, on_host(path, tensor))
        if not _is_wrapper(tensor):
            plain = tensor.detach().as_subclass(torch.Tensor)
            return "subclass", [*title_of(tensor, path), added(path, on_host(path, plain))]
        parts, more = tensor.__tensor_flatten__()
        encoded = {part: as_json(getattr(tensor, part), f"{path}.{part}", encode) for part in parts}
        shape = [list(tensor.shape), list(tensor.stride())]
        return "wrapper", [*title_of(tensor, path), encoded, as_json(more, f"{path}.context", encode), *shape]

    return as_json(value, name, encode)


def put_together(encoded: Json, arrays: Mapping[str, Any]) -> Any:
    """Returns the value that `taken_apart` was given, with tensors on the CPU.

    Raises:
        InvalidArgumentError: This program has not loaded a class that is needed, or has no device for a generator.
    """

    def tensor(title: str) -> torch.Tensor:
        return tensor_of(np.asarray(arrays[title])).clone()

    def decode(kind: str, content: Json) -> Any:
        match kind:
            case "tensor":
                return tensor(content)
            case "array of tensors":
                return np.array(arrays[content])
            case "subclass":
                module, title, name = content
                return tensor(name).as_subclass(_tensor_class(module, title))
            case "wrapper":
                module, title, parts, more, shape, stride = content
                parts, more = from_json(parts, decode), from_json(more, decode)
                unflatten = _tensor_class(module, title).__tensor_unflatten__
                return unflatten(parts, more, torch.Size(shape), tuple(stride))
            case "generator":
                return _generator(content[0], tensor(content[1]))
            case "size":
                return torch.Size(content)
            case "name in torch" if isinstance(getattr(torch, content, None), _NAMES_IN_TORCH):
                return getattr(torch, content)
        raise InvalidArgumentError(
            f"the state of another worker has {kind} {content!r}, which this PyTorch does not know"
        )

    return from_json(encoded, decode)


def as_given(loaded: Any, given: Any) -> Any:
    """Returns what an optimizer has loaded, with the types and dtypes of what it was given.

    PyTorch converts what an optimizer remembers to the dtype of its parameter; other workers have not done so.
    """
    if isinstance(given, torch.Tensor):
        is_same = type(loaded) is type(given) and loaded.dtype is given.dtype
        return loaded if is_same else given.to(loaded.device if isinstance(loaded, torch.Tensor) else given.device)
    if type(loaded) is not type(given):
        return given
    if isinstance(given, list | tuple) and not hasattr(given, "_fields"):
        return type(given)(as_given(*each) for each in zip(loaded, given, strict=True))
    if type(given) is dict:
        return {key: as_given(loaded[key], each) for key, each in given.items()}
    return loaded


def _is_wrapper(tensor: torch.Tensor) -> bool:
    return type(tensor) is not torch.Tensor and hasattr(tensor, "__tensor_flatten__")


def _tensor_class(module: str, title: str) -> Any:
    found = class_named(module, title)
    if found is None or not issubclass(found, torch.Tensor):
        raise InvalidArgumentError(
            f"the state of another worker has a tensor of class {title!r} of module {module!r}, which this program has "
            "not loaded; import it before training"
        )
    return found


def _generator(device: str, state: torch.Tensor) -> torch.Generator:
    try:
        generator = torch.Generator(device)
        generator.set_state(state)
    except (RuntimeError, TypeError) as error:
        raise InvalidArgumentError(
            f"the state of another worker has a generator of random numbers on {device!r}, which cannot be made here: "
            f"{error}"
        ) from None
    return generator


_PARAMETERS, _BUFFERS = "parameters/", "buffers/"
_OPTIMIZER, _SCHEDULER = "optimizer", "scheduler"
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
        """Takes the arguments of `average_gradients`, with the model out of its wrapper.

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
