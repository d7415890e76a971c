"""The events that change a layer; nothing else does.

They carry the values that are there after a change, not how those were computed: replayed wherever, they give the same
bits. Arrays are never written to.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from gradserve_server.devices.device import Array
from gradserve_server.layers.batch_norm.averages import MovingAverages
from gradserve_server.layers.batch_norm.saved import Moments, Saved
from gradserve_server.layers.batch_norm.variables import Variables


@dataclass(frozen=True, eq=False)
class VariablesCreated:
    """The variables got their first values."""

    variables: Variables


@dataclass(frozen=True, eq=False)
class VariablesSet:
    """A call set variables.

    Attributes:
        values: By TensorFlow's names, relative to the scope.
    """

    values: Mapping[str, Array]


@dataclass(frozen=True)
class AdjustmentDrawn:
    """A forward was given a random adjustment, which it has whenever it is repeated.

    Attributes:
        forward_id: Of the forward.
        number: That of the draw, from which scale and bias follow.
    """

    forward_id: str
    number: int


@dataclass(frozen=True, eq=False, kw_only=True)
class ForwardEnded:
    """A forward has left something, or has moved the averages.

    Attributes:
        forward_id: Of the forward.
        lease: Seconds without use until what it left is forgotten.
        saved: For its backward, if that may come.
        pending: For the moving averages, if their update waits.
        averages: The moving averages after an update in place; None if they did not move.
        released: Earlier forwards whose backwards will not come.
    """

    forward_id: str
    lease: float
    saved: Saved | None = None
    pending: Moments | None = None
    averages: MovingAverages | None = None
    released: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class UpdatesRun:
    """The moving averages have followed a forward whose update waited.

    Attributes:
        forward_id: Of the forward.
        averages: The moving averages now.
    """

    forward_id: str
    averages: MovingAverages


@dataclass(frozen=True)
class BackwardEnded:
    """The last backward of a forward was computed."""

    forward_id: str


@dataclass(frozen=True)
class ForwardsReleased:
    """Nobody will call for the backwards of forwards.

    Attributes:
        forward_ids: Of the forwards; those that are not kept are passed over.
        with_updates: Whether updates that wait will not be run either.
    """

    forward_ids: tuple[str, ...]
    with_updates: bool


@dataclass(frozen=True)
class ForwardsExpired:
    """The leases of forwards have ended."""

    forward_ids: tuple[str, ...]


Event: TypeAlias = (
    VariablesCreated
    | VariablesSet
    | AdjustmentDrawn
    | ForwardEnded
    | UpdatesRun
    | BackwardEnded
    | ForwardsReleased
    | ForwardsExpired
)
