"""Calls of a layer and their results."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from gradserve_server.devices.device import Array
from gradserve_server.layers.batch_norm.config import IgnoredArgument
from gradserve_server.layers.batch_norm.forwards import Forward
from gradserve_server.layers.batch_norm.implementation import Implementation
from gradserve_server.layers.batch_norm.spec import BackwardAttributes, BackwardInputs, BackwardOutputs, BackwardPlan
from gradserve_server.ops.runner import CheckedCall


@dataclass(frozen=True)
class ForwardCall:
    """The options of a forward.

    Attributes:
        forward_id: The id of the forward; empty to have the layer make one.
        keep_for_backward: Whether to keep what a backward needs; None for the value of is_training.
        lease: Seconds without use until what is kept is forgotten.
        released: Earlier forwards whose backwards will not come.
    """

    is_training: bool = True
    forward_id: str = ""
    keep_for_backward: bool | None = None
    lease: float = 600.0
    released: Sequence[str] = ()


@dataclass(frozen=True)
class ForwardResult:
    """The result of a forward.

    Attributes:
        outputs: The outputs, in host memory if that was asked for, else in the device's. They must not be written to,
            as the layer may keep them, too.
        moved: The inputs that were copied to the device's memory, by name.
        forward_id: The id of the forward; empty if neither backward nor update can follow.
        regularization_losses: The losses by variable.
        drawn: Scale and bias of the adjustment, if it was drawn.
    """

    outputs: Array
    moved: Mapping[str, Array]
    forward_id: str
    has_pending_updates: bool
    implementation: Implementation
    regularization_losses: Mapping[str, float]
    ignored: tuple[IgnoredArgument, ...]
    drawn: tuple[NDArray[Any], NDArray[Any]] | None


@dataclass(frozen=True)
class BackwardCall:
    """A checked backward of a forward that is kept."""

    forward: Forward
    checked: CheckedCall[BackwardInputs, BackwardAttributes, BackwardOutputs, BackwardPlan]
