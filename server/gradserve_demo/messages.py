"""The messages between the coordinator and a worker process."""

from dataclasses import dataclass
from typing import TypeAlias

from gradserve_demo.arrays import Weights
from gradserve_demo.batches import Batches
from gradserve_demo.digits import Digits


@dataclass(frozen=True)
class WorkerTask:
    """Everything a worker process needs; sent to it when it is spawned."""

    index: int
    """The index of the worker's share of every joint batch."""

    worker_id: str
    """Its name on the server."""

    address: str
    """The address of the server."""

    run_name: str
    """Prefix of the names of everything that this run has on the server."""

    num_required: int
    """Gradients that complete a round."""

    batch_norm: bool
    """True if the hidden layer is batch normalization on the server."""

    num_steps: int
    """Steps until the training is over."""

    learning_rate: float
    """Step size of plain gradient descent."""

    keep_averages: int
    """Averages of past rounds that the server keeps."""

    timeout: float
    """Seconds that any single wait may take."""

    pause: float
    """Seconds to sleep before every push, to be artificially slow; 0 for none."""

    weights: Weights
    """The initial weights."""

    digits: Digits
    """The data of all workers."""

    batches: Batches
    """Determines the worker's examples at every step."""


@dataclass(frozen=True)
class Ready:
    """The worker is connected and waits for the signal to start."""


@dataclass(frozen=True)
class Stepped:
    """The worker has pushed a gradient and then applied every average up to `step`."""

    step: int
    """Number of averages applied to its weights so far."""

    loss: float
    """Loss of its share of the batch, before the push."""

    accepted: bool
    """True if the gradient was part of the round; False if it was stale."""

    accuracy: float | None
    """Accuracy on the test images; set by the first worker at the end of an epoch."""


@dataclass(frozen=True)
class Finished:
    """The worker has applied the average of every round."""

    weights: Weights
    """Its final weights, and the state of its hidden layer."""

    contributed: int
    """Pushes that were accepted."""

    stale: int
    """Pushes that came too late."""

    snapshots_loaded: int
    """The number of times that it was too far behind and had to load a snapshot of the weights."""


@dataclass(frozen=True)
class Failed:
    """The worker gave up."""

    error: str
    """The exception in one line."""

    traceback: str
    """The exception's traceback."""


Message: TypeAlias = Ready | Stepped | Finished | Failed
