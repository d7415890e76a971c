"""Steps of optimizers on one number, whose gradient never changes: what all elements of the parameters become."""

from __future__ import annotations

import math

LEARNING_RATE = 0.125
MOMENTUM = 0.5
BETAS = (0.9, 0.999)
EPSILON = 1e-8


def expected_value(optimizer: str, gradient: float, num_steps: int) -> float:
    """Returns what 0 becomes in some steps of "momentum" or "adam" with the settings above, as in PyTorch.

    TensorFlow's momentum is the same for a learning rate that does not change.
    """
    value = first = second = 0.0
    for step in range(1, num_steps + 1):
        if optimizer == "momentum":
            first = MOMENTUM * first + gradient
            value -= LEARNING_RATE * first
        else:
            first = BETAS[0] * first + (1 - BETAS[0]) * gradient
            second = BETAS[1] * second + (1 - BETAS[1]) * gradient**2
            denominator = math.sqrt(second / (1 - BETAS[1] ** step)) + EPSILON
            value -= LEARNING_RATE * first / (1 - BETAS[0] ** step) / denominator
    return value
