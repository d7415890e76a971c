"""The server strategies of Flower as optimizers, with its argument names, its defaults and its equations.

They take deltas, as Flower does: local parameters minus those of the server. Equations are those of flwr 1.42, which
differ from those of the papers and of PyTorch; docs/parameters_optimizers.md has them.
"""

from dataclasses import dataclass

from gradserve.optim.optimizers import Optimizer
from gradserve.public_names import publish as _publish

__all__ = ["FedAdagrad", "FedAdam", "FedAvgM", "FedYogi"]


@dataclass(frozen=True, repr=False)
class FedAdam(Optimizer):
    """Flower's FedAdam: Adam whose corrections are those of the next round, and with tau beside the uncorrected root.

    Attributes:
        eta: The learning rate of the server.
        beta_1: The decay rate of the moving average of the update.
        beta_2: The decay rate of the moving average of its square.
        tau: Added to the denominator.
    """

    eta: float = 1e-1
    beta_1: float = 0.9
    beta_2: float = 0.99
    tau: float = 1e-3


@dataclass(frozen=True, repr=False)
class FedYogi(Optimizer):
    """Flower's FedYogi: Yogi without corrections, whose averages begin with 0.

    Attributes:
        eta: The learning rate of the server.
        beta_1: The decay rate of the moving average of the update.
        beta_2: The decay rate of the moving average of its square.
        tau: Added to the denominator.
    """

    eta: float = 1e-2
    beta_1: float = 0.9
    beta_2: float = 0.99
    tau: float = 1e-3


@dataclass(frozen=True, repr=False)
class FedAdagrad(Optimizer):
    """Flower's FedAdagrad: Adagrad whose sum of squares begins with 0.

    Attributes:
        eta: The learning rate of the server.
        tau: Added to the denominator.
    """

    eta: float = 1e-1
    tau: float = 1e-3


@dataclass(frozen=True, repr=False)
class FedAvgM(Optimizer):
    """Flower's FedAvgM: SGD with momentum, and without dampening.

    Attributes:
        server_learning_rate: The learning rate of the server.
        server_momentum: The factor of the momentum buffer in each round.
    """

    server_learning_rate: float = 1.0
    server_momentum: float = 0.0


_publish(__name__, globals(), __all__)
