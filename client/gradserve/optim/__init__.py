"""Optimizers and schedules of parameters on a server.

optimizer = gradserve.optim.SGD(0.7, momentum=0.9, nesterov=True)
schedule = gradserve.optim.cosine(rounds=1000, end=0.1, warmup=20)
optimizer = gradserve.optim.flower.FedAdam(eta=0.1)
optimizer = gradserve.optim.from_torch(torch.optim.AdamW(model.parameters(), 1e-3))

They are values: the server evaluates them, with the equations and defaults of PyTorch unless they are named otherwise.
Their state is on the server, one for each component: float32, or float64 for components of that dtype.
"""

from gradserve.optim import flower
from gradserve.optim.optimizers import (
    SGD,
    Adagrad,
    AdagradOptax,
    Adam,
    AdamW,
    Optimizer,
    Schedule,
    Yogi,
    adagrad_optax,
    constant,
    cosine,
    linear,
)
from gradserve.optim.translation import from_optax, from_torch
from gradserve.public_names import publish as _publish

__all__ = [
    "SGD",
    "Adagrad",
    "AdagradOptax",
    "Adam",
    "AdamW",
    "Optimizer",
    "Schedule",
    "Yogi",
    "adagrad_optax",
    "constant",
    "cosine",
    "flower",
    "from_optax",
    "from_torch",
    "linear",
]

_publish(__name__, globals(), __all__)
