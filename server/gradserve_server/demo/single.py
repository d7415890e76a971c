"""The same training in one process, for comparison."""

import time
from collections.abc import Callable

from gradserve_server.demo.batches import Batches
from gradserve_server.demo.digits import Digits
from gradserve_server.demo.network import Weights, accuracy, descend, loss_and_gradients, mean_loss
from gradserve_server.demo.report import AccuracyPoint, TrainingResult


def train_in_one_process(
    digits: Digits,
    batches: Batches,
    weights: Weights,
    *,
    num_steps: int,
    learning_rate: float,
    on_step: Callable[[int, float], None],
) -> TrainingResult:
    """Trains on the joint batches of all workers.

    Args:
        digits: The data.
        batches: Says which examples belong to a step.
        weights: The initial weights.
        num_steps: Steps to take.
        learning_rate: Step size of plain gradient descent.
        on_step: Called after every step with the steps taken so far and the loss of the batch.
    """
    losses: list[float] = []
    accuracies = [AccuracyPoint(0, accuracy(weights, digits.test_images, digits.test_labels))]
    begin = time.perf_counter()
    for step in range(num_steps):
        examples = batches.joint(step)
        loss, gradients = loss_and_gradients(weights, digits.train_images[examples], digits.train_labels[examples])
        weights = descend(weights, gradients, learning_rate)
        losses.append(loss)
        if (step + 1) % batches.steps_per_epoch == 0:
            accuracies.append(AccuracyPoint(step + 1, accuracy(weights, digits.test_images, digits.test_labels)))
        on_step(step + 1, loss)
    return TrainingResult(
        losses=tuple(losses),
        accuracies=tuple(accuracies),
        weights=weights,
        final_loss=mean_loss(weights, digits.train_images, digits.train_labels),
        final_accuracy=accuracy(weights, digits.test_images, digits.test_labels),
        seconds=time.perf_counter() - begin,
    )
