"""The events that change a layer, and the data of forwards that they carry.

Nothing but events changes a layer. They carry the values after a change, not how to compute them: a replay gives the
same bits on any machine. Their arrays are read-only.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from gradserve_server.devices.device import Array
from gradserve_server.layers.batch_norm.config import BatchNormConfig
from gradserve_server.layers.batch_norm.spec import (
    BackwardAttributes,
    BackwardInputs,
    ForwardInputs,
    ForwardOutputs,
    ForwardPlan,
    Implementation,
)
from gradserve_server.layers.batch_norm.variables import MovingAverages, Variables


@dataclass(frozen=True)
class Moments:
    """The moments of a batch, each of shape [C], and the implementation that computed them."""

    mean: Array
    variance: Array
    implementation: Implementation


@dataclass(frozen=True, eq=False, kw_only=True)
class Saved:
    """The data of a forward that its backward needs; for the arrays see `BackwardInputs`."""

    is_training: bool
    implementation: Implementation
    inputs: Array
    mean: Array
    variance: Array
    beta: Array | None = None
    gamma: Array | None = None
    batch_weights: Array | None = None
    adjustment_scale: Array | None = None
    adjustment_bias: Array | None = None
    r: Array | None = None
    d: Array | None = None
    activation_saved: Array | None = None

    @classmethod
    def of(cls, inputs: ForwardInputs, outputs: ForwardOutputs, plan: ForwardPlan, *, is_training: bool) -> "Saved":
        """Returns what a forward with `saves` keeps.

        Args:
            inputs: The inputs, in the memory of the device.
            outputs: The results.
            plan: The plan of the forward.
            is_training: Whether the moments of the batch were used.
        """
        assert outputs.mean is not None
        assert outputs.variance is not None
        return cls(
            is_training=is_training,
            implementation=plan.implementation,
            inputs=inputs.inputs,
            mean=outputs.mean,
            variance=outputs.variance,
            beta=inputs.beta,
            gamma=inputs.gamma,
            batch_weights=inputs.batch_weights if plan.uses_weights else None,
            adjustment_scale=inputs.adjustment_scale if plan.uses_adjustment else None,
            adjustment_bias=inputs.adjustment_bias if plan.uses_adjustment else None,
            r=outputs.r,
            d=outputs.d,
            activation_saved=outputs.activation_saved,
        )

    def by_field(self) -> dict[str, Array]:
        """Returns the arrays that exist, by the names of the fields."""
        others = ("is_training", "implementation")
        return {name: array for name, array in vars(self).items() if name not in others and array is not None}

    def backward_inputs(self, outputs_gradient: Array) -> BackwardInputs:
        """Returns the inputs of the backward."""
        return BackwardInputs(outputs_gradient=outputs_gradient, **self.by_field())

    def backward_attributes(self, config: BatchNormConfig) -> BackwardAttributes:
        """Returns the attributes of the backward, in a layer with this configuration."""
        return BackwardAttributes(config, self.is_training, self.implementation)


def arrays_kept(saved: Saved | None, moments: Moments | None) -> list[Array]:
    """Returns the arrays that a forward keeps, each once."""
    arrays = [] if saved is None else list(saved.by_field().values())
    arrays += [] if moments is None else [moments.mean, moments.variance]
    return list({id(array): array for array in arrays}.values())


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
    """A random adjustment was drawn for a forward. A retry of the forward gets the same one.

    Attributes:
        forward_id: The id of the forward.
        number: The number of the draw, which decides scale and bias.
    """

    forward_id: str
    number: int


@dataclass(frozen=True, eq=False, kw_only=True)
class ForwardEnded:
    """A forward ended that keeps something or updated the averages.

    Attributes:
        forward_id: The id of the forward.
        lease: Seconds without use after which the kept data is dropped.
        saved: What its backward needs, if one may come.
        pending: What the update of the moving averages needs, if it is pending.
        averages: The moving averages after an update in place; None if they did not move.
        released: Earlier forwards that need no backward any more.
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
    """Forwards were released: they need no backward any more.

    Attributes:
        forward_ids: The ids of the forwards; unknown ones are ignored.
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
