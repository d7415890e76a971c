"""The argument classes of batch normalization layers."""

from dataclasses import KW_ONLY, dataclass


@dataclass(frozen=True)
class Initializer:
    """An initializer of a variable, by its name in TensorFlow.

    Parameters that are None take the server's defaults. A parameter that the named initializer does not have is
    refused.

    Attributes:
        name: "zeros", "ones", "constant", "uniform", "normal", "truncated_normal", "glorot" or "glorot_normal".
        value: The value of "constant"; 0 by default.
        minval: The lower bound of "uniform", included; 0 by default.
        maxval: The upper bound of "uniform", excluded; 1 by default.
        mean: The mean of "normal" and "truncated_normal"; 0 by default.
        stddev: The standard deviation of "normal" and "truncated_normal"; 1 by default.
        seed: The seed of the random initializers. The same seed gives the same values on every device, but not
            TensorFlow's. None: new values at each creation.
    """

    name: str
    _: KW_ONLY
    value: float | None = None
    minval: float | None = None
    maxval: float | None = None
    mean: float | None = None
    stddev: float | None = None
    seed: int | None = None


@dataclass(frozen=True)
class Regularizer:
    """A regularizer of a variable, by its name in tf.contrib.layers.

    Attributes:
        name: "l1", "l2" or "l1_l2".
        l1: The factor of the sum of absolute values; 0 or more. "l1" needs it; 1 by default in "l1_l2".
        l2: The factor of half the sum of squares; 0 or more. "l2" needs it; 1 by default in "l1_l2".
    """

    name: str
    _: KW_ONLY
    l1: float | None = None
    l2: float | None = None


@dataclass(frozen=True)
class RandomAdjustment:
    """An adjustment drawn at random for each channel of each forward in training.

    Attributes:
        scale: The range of the scale: (low, high), low included, high excluded.
        bias: The range of the bias, likewise.
        seed: The seed that determines a layer's n-th draw. None: a random seed.
    """

    scale: tuple[float, float]
    bias: tuple[float, float]
    seed: int | None = None
