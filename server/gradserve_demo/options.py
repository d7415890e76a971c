"""The settings of the demo, and its exception."""

from dataclasses import dataclass
from pathlib import Path

_DILOCO_STEPS = 10


class DemoError(Exception):
    """The demo could not finish; the message says why."""


@dataclass(frozen=True)
class DemoOptions:
    """The settings of one demo run."""

    workers: int = 4
    """Gradients that every round needs."""

    backup: int = 0
    """Additional workers; the last of them is artificially slow."""

    kill: bool = False
    """Kill a worker in the middle of the training, and start it again."""

    diloco: bool = False
    """Let workers train by themselves for 10 steps, and synchronize then."""

    batch_norm: bool = False
    """Use batch normalization and relu, computed by the server, instead of tanh."""

    epochs: int = 20
    """Passes over the training data."""

    address: str | None = None
    """Server to use; without one the demo starts its own."""

    output: Path = Path("demo-output")
    """Folder for the plot; created if it does not exist."""

    batch_size: int = 16
    """Examples in one worker's share of a step."""

    hidden: int = 32
    """Units in the hidden layer."""

    learning_rate: float = 0.5
    """Step size of plain gradient descent, which the server takes."""

    seed: int = 0
    """Decides the data split, the batches and the initial weights."""

    slow_seconds: float = 0.03
    """The seconds that the slow worker pauses before every push, several times as long as a round takes."""

    timeout: float = 30.0
    """Seconds that any single wait may take before the demo gives up."""

    def __post_init__(self) -> None:
        for name, least in (("workers", 1), ("backup", 0), ("epochs", 1), ("batch_size", 1), ("hidden", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if self.batch_norm and self.backup:
            raise ValueError("batch_norm needs every worker in every step, so backup must be 0")
        if self.batch_norm and self.kill:
            raise ValueError("batch_norm needs the forwards of every worker, so kill must be False")
        if self.batch_norm and self.diloco:
            raise ValueError("batch_norm needs a round after every step, so diloco must be False")

    @property
    def sync_every(self) -> int:
        """The steps of a worker between two rounds."""
        return _DILOCO_STEPS if self.diloco else 1

    @property
    def num_processes(self) -> int:
        """Total number of worker processes."""
        return self.workers + self.backup

    @property
    def killed(self) -> int | None:
        """The index of the worker that is killed, the last one of those that are not backups; None for none."""
        return self.workers - 1 if self.kill else None
