"""Calls of a layer, and what they give."""

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
    """How a forward is to be computed.

    Attributes:
        forward_id: Empty to have one made.
        keep_for_backward: None for whether it is in training.
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
    """What a forward gave.

    Attributes:
        outputs: In host memory where that was asked for, else in the device's. Not to be written to: the layer may keep
            them too.
        moved: The inputs that were brought into the device's memory, by name.
        forward_id: Empty where nothing is left to do.
        regularization_losses: By variable.
        drawn: The adjustment, scale and bias, where it was drawn.
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
    """A backward that was checked, of a forward that is kept."""

    forward: Forward
    checked: CheckedCall[BackwardInputs, BackwardAttributes, BackwardOutputs, BackwardPlan]
