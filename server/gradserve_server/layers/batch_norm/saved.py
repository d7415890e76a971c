"""What a forward keeps for its backward and for the moving averages."""

from dataclasses import dataclass

from gradserve_server.devices.device import Array
from gradserve_server.layers.batch_norm.config import BatchNormConfig
from gradserve_server.layers.batch_norm.implementation import Implementation
from gradserve_server.layers.batch_norm.spec import (
    BackwardAttributes,
    BackwardInputs,
    ForwardInputs,
    ForwardOutputs,
    ForwardPlan,
)


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
        arrays = {
            "inputs": self.inputs,
            "mean": self.mean,
            "variance": self.variance,
            "beta": self.beta,
            "gamma": self.gamma,
            "batch_weights": self.batch_weights,
            "adjustment_scale": self.adjustment_scale,
            "adjustment_bias": self.adjustment_bias,
            "r": self.r,
            "d": self.d,
            "activation_saved": self.activation_saved,
        }
        return {name: array for name, array in arrays.items() if array is not None}

    def backward_inputs(self, outputs_gradient: Array) -> BackwardInputs:
        """Returns the inputs of the backward."""
        return BackwardInputs(
            outputs_gradient=outputs_gradient,
            inputs=self.inputs,
            mean=self.mean,
            variance=self.variance,
            beta=self.beta,
            gamma=self.gamma,
            batch_weights=self.batch_weights,
            adjustment_scale=self.adjustment_scale,
            adjustment_bias=self.adjustment_bias,
            r=self.r,
            d=self.d,
            activation_saved=self.activation_saved,
        )

    def backward_attributes(self, config: BatchNormConfig) -> BackwardAttributes:
        """Returns the attributes of the backward, in a layer with this configuration."""
        return BackwardAttributes(config, self.is_training, self.implementation)


def arrays_kept(saved: Saved | None, moments: Moments | None) -> list[Array]:
    """Returns the arrays that a forward keeps, each once."""
    arrays = [] if saved is None else list(saved.by_field().values())
    arrays += [] if moments is None else [moments.mean, moments.variance]
    return list({id(array): array for array in arrays}.values())
