"""The same training in one process, for comparison."""

import time
from collections.abc import Callable

from gradserve_demo.arrays import Weights
from gradserve_demo.batches import Batches
from gradserve_demo.digits import Digits
from gradserve_demo.hidden_layer import HiddenLayer
from gradserve_demo.network import accuracy, descend, loss_and_gradients, mean_loss
from gradserve_demo.report import AccuracyPoint, TrainingResult


def train_in_one_process(
    digits: Digits,
    batches: Batches,
    weights: Weights,
    layer: HiddenLayer,
    *,
    num_steps: int,
    learning_rate: float,
    on_step: Callable[[int, float], None],
) -> TrainingResult:
    """Trains on the joint batches of all workers.

    Args:
        digits: The data.
        batches: Determines the examples of each step.
        weights: The initial weights.
        layer: The hidden layer.
        num_steps: Steps to take.
        learning_rate: Step size of plain gradient descent.
        on_step: Called after every step with the steps taken so far and the loss of the batch.
    """

    def test_accuracy() -> float:
        return accuracy(weights | layer.state(), digits.test_images, digits.test_labels, layer)

    losses: list[float] = []
    accuracies = [AccuracyPoint(0, test_accuracy())]
    begin = time.perf_counter()
    for step in range(num_steps):
        examples = batches.joint(step)
        images, labels = digits.train_images[examples], digits.train_labels[examples]
        loss, gradients = loss_and_gradients(weights, images, labels, layer)
        weights = descend(weights, gradients, learning_rate)
        layer.end_step(weights)
        losses.append(loss)
        if (step + 1) % batches.steps_per_epoch == 0:
            accuracies.append(AccuracyPoint(step + 1, test_accuracy()))
        on_step(step + 1, loss)
    seconds = time.perf_counter() - begin
    weights = weights | layer.state()
    return TrainingResult(
        losses=tuple(losses),
        accuracies=tuple(accuracies),
        weights=weights,
        final_loss=mean_loss(weights, digits.train_images, digits.train_labels, layer),
        final_accuracy=test_accuracy(),
        seconds=seconds,
    )
