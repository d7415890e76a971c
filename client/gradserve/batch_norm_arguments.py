"""What a batch normalization layer is made of, beside plain values."""

from dataclasses import KW_ONLY, dataclass


@dataclass(frozen=True)
class Initializer:
    """The first value of a variable, by the name of one of TensorFlow's initializers.

    Parameters that are None are the server's defaults. One that the named initializer does not have is refused.

    Attributes:
        name: "zeros", "ones", "constant", "uniform", "normal", "truncated_normal", "glorot" or "glorot_normal".
        value: Of "constant"; 0 by default.
        minval: Of "uniform": the smallest value; 0 by default.
        maxval: Of "uniform": what all values are below; 1 by default.
        mean: Of "normal" and "truncated_normal"; 0 by default.
        stddev: Of "normal" and "truncated_normal"; 1 by default.
        seed: Of the random ones. The same one gives the same values on every device, but not TensorFlow's. None:
            others at each creation.
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
        l1: Weighs the sum of absolute values; 0 or more. "l1" needs it; 1 by default in "l1_l2".
        l2: Weighs half the sum of squares; 0 or more. "l2" needs it; 1 by default in "l1_l2".
    """

    name: str
    _: KW_ONLY
    l1: float | None = None
    l2: float | None = None


@dataclass(frozen=True)
class RandomAdjustment:
    """An adjustment drawn at random for each channel in each forward in training.

    Attributes:
        scale: From this value (included) to that (excluded).
        bias: As `scale`.
        seed: The n-th draw of a layer follows from it. None: from a random one.
    """

    scale: tuple[float, float]
    bias: tuple[float, float]
    seed: int | None = None
