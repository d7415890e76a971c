"""Saved parameters: what their files hold beside arrays, and the checks of files before anything is sent."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from google.protobuf import json_format
from google.protobuf.message import Message
from numpy.typing import NDArray

from gradserve.conversion.plain import is_text
from gradserve.saved import safetensors
from gradserve.saved.safetensors import FormatError
from gradserve_protocol.argument import Argument
from gradserve_protocol.arrays import Array
from gradserve_protocol.digest import digest_of
from gradserve_protocol.errors import InvalidArgumentError
from gradserve_protocol.printing import abbreviated
from gradserve_protocol.v1 import parameters_pb2

PathLike: TypeAlias = str | os.PathLike[str]
_FORMAT = 1
_KEY = "gradserve"
"""The name of our text in the metadata of a file."""
_UPDATES = {each: each for each in (None, "delta", "gradient")}
_PARAMETER, _OPTIMIZER = "param/", "optimizer/"


@dataclass(frozen=True)
class SavedState:
    """The state of an optimizer in a file.

    Attributes:
        slots: Arrays by slot and component; the slot "master" has the values of 16-bit components in float32.
        component_steps: By component, the number of rounds in which it had an update.
        rounds: The number of rounds that the schedule has seen.
        optimizer: The optimizer that they belong to, as a message.
    """

    slots: Mapping[tuple[str, str], Array]
    component_steps: Mapping[str, int]
    rounds: int
    optimizer: parameters_pb2.Optimizer


@abbreviated
@dataclass(frozen=True, eq=False, repr=False)
class SavedParameters(Mapping[str, NDArray[Any]]):
    """Parameters in a file: a mapping from component names to arrays.

    `Client.parameters` takes them as values: the new parameters go on from their step, and with the state of the
    optimizer if the file has it.

    Attributes:
        components: Arrays by name.
        step: Their step; 0 in a file that is only a model.
        digest: The digest of the version, 32 hexadecimal digits.
        state: The state of the optimizer; None if the file has none.
        schedule: The schedule of the learning rate, as a message; None for none.
        update: The kind of updates of the run, "delta" or "gradient"; None for a model of another program.
    """

    components: Mapping[str, NDArray[Any]]
    step: int
    digest: str
    state: SavedState | None = field(repr=False)
    schedule: parameters_pb2.Schedule | None = field(repr=False)
    update: str | None = None

    def check_update(self, update: str) -> None:
        """Checks that a run goes on with updates of the kind with which it was saved: otherwise it would go astray.

        Raises:
            InvalidArgumentError: It does not.
        """
        if self.update not in (None, update):
            raise InvalidArgumentError(
                f"expected update={self.update!r}, with which these parameters were saved, got {update!r}: the sign of "
                "every step would be wrong",
                field="update",
            )

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self.components[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.components)

    def __len__(self) -> int:
        return len(self.components)


def save(path: PathLike, saved: SavedParameters) -> None:
    """Writes parameters to a file, in safetensors' format; nobody ever sees a part of it.

    Raises:
        OSError: It cannot be written.
    """
    arrays: dict[str, Array] = {f"{_PARAMETER}{name}": array for name, array in saved.components.items()}
    about: dict[str, Any] = {
        "format": _FORMAT,
        "components": list(saved.components),
        "step": saved.step,
        "digest": saved.digest,
        "update": saved.update,
    }
    if saved.schedule is not None:
        about["schedule"] = _as_json(saved.schedule)
    if (state := saved.state) is not None:
        arrays |= {f"{_OPTIMIZER}{slot}/{name}": array for (slot, name), array in state.slots.items()}
        about |= {
            "optimizer": _as_json(state.optimizer),
            "component_steps": dict(state.component_steps),
            "rounds": state.rounds,
            "slots": list(map(list, state.slots)),
            "state_digest": digest_of(state.slots.values()).hex(),
        }
    safetensors.write(Path(path), arrays, {_KEY: json.dumps(about), "format": "pt"})


def load_parameters(path: str | os.PathLike[str]) -> SavedParameters:
    """Reads parameters that `Parameters.save` has written, or a model in a safetensors file of another program.

    The result is a mapping from names to arrays. `Client.parameters` takes it as values: new parameters go on from its
    step, and with the state of the optimizer if the file has it. A model of another program begins at step 0.

    Args:
        path: The file.

    Returns:
        The parameters.

    Raises:
        InvalidArgumentError: The file is damaged or something else; the message says what is wrong.
        OSError: The file cannot be read.
    """
    place = as_path(path)
    try:
        contents = safetensors.read(place)
        return _interpreted(contents)
    except FormatError as error:
        raise InvalidArgumentError(
            f"expected a file with saved parameters or a model, got {str(place)!r}: {error}", field="path"
        ) from None


def as_path(value: object) -> Path:
    """Returns the argument `path`.

    Raises:
        InvalidArgumentError: It is not a path.
    """
    if isinstance(value, str | os.PathLike):
        text = os.fspath(value)
        if is_text(text) and text and "\0" not in text:
            return Path(text)
    raise Argument("path").error("the path of a file", value)


def _interpreted(contents: safetensors.Contents) -> SavedParameters:
    if _KEY not in contents.metadata:
        return SavedParameters(contents.arrays, 0, digest_of(contents.arrays.values()).hex(), None, None)
    try:
        about = json.loads(contents.metadata[_KEY])
        _check_format(about["format"])
        components = {name: contents.arrays[f"{_PARAMETER}{name}"] for name in about["components"]}
        step, digest = _count(about["step"]), str(about["digest"])
        schedule = _parsed(about["schedule"], parameters_pb2.Schedule()) if "schedule" in about else None
        state = _state(about, contents.arrays) if "optimizer" in about else None
        update = _UPDATES[about.get("update")]
    except FormatError:
        raise
    except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise FormatError(f"what it says of its parameters is incomplete: {type(error).__name__}: {error}") from None
    if digest_of(components.values()).hex() != digest:
        raise FormatError("the parameters are not those that were saved: their digest differs")
    return SavedParameters(components, step, digest, state, schedule, update)


def _check_format(format_: Any) -> None:
    if type(format_) is not int or not 1 <= format_ <= _FORMAT:
        raise FormatError(f"it has format {format_!r}, and this version of gradserve reads up to {_FORMAT}")


def _state(about: Mapping[str, Any], arrays: Mapping[str, Array]) -> SavedState:
    slots = {(slot, name): arrays[f"{_OPTIMIZER}{slot}/{name}"] for slot, name in about["slots"]}
    if digest_of(slots.values()).hex() != about["state_digest"]:
        raise FormatError("the state of the optimizer is not the one that was saved: its digest differs")
    return SavedState(
        slots,
        {name: _count(about["component_steps"][name]) for name in about["components"]},
        _count(about["rounds"]),
        _parsed(about["optimizer"], parameters_pb2.Optimizer()),
    )


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise FormatError(f"expected a number of rounds, got {value!r}")
    return value


def _as_json(message: Message) -> dict[str, Any]:
    return json_format.MessageToDict(message, preserving_proto_field_name=True)


def _parsed(value: Any, message: Any) -> Any:
    try:
        return json_format.ParseDict(value, message)
    except json_format.ParseError as error:
        raise FormatError(f"it names an optimizer or a schedule that is not known: {error}") from None
