"""The events that change a layer; nothing else does.

They carry the values after a change, not how to compute them: a replay gives the same bits on any machine. Arrays are
never written to.
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
    """The variables were created, with their initial values."""

    variables: Variables


@dataclass(frozen=True, eq=False)
class VariablesSet:
    """A call set variables.

    Attributes:
        values: The new values, by TensorFlow's names relative to the scope.
    """

    values: Mapping[str, Array]


@dataclass(frozen=True)
class AdjustmentDrawn:
    """A random adjustment was drawn for a forward, which keeps it when it is repeated.

    Attributes:
        forward_id: The id of the forward.
        number: The number of the draw, which decides scale and bias.
    """

    forward_id: str
    number: int


@dataclass(frozen=True, eq=False, kw_only=True)
class ForwardEnded:
    """A forward has ended that keeps something or updated the averages.

    Attributes:
        forward_id: The id of the forward.
        lease: Seconds without use until what it left is forgotten.
        saved: What its backward needs, if one may come.
        pending: What the update of the moving averages needs, if it is pending.
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
    """The pending update of a forward was run.

    Attributes:
        forward_id: The id of the forward.
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
    """Forwards were released: their backwards will not come.

    Attributes:
        forward_ids: The ids of the forwards; those that are not kept are ignored.
        with_updates: Whether their pending updates were released, too.
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
