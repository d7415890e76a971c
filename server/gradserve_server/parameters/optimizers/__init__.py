"""Optimizers: what turns the reduced updates of a round into the next version of the parameters.

* `optimizer` declares what an optimizer is: settings, slots, numbers and a loop; and the schedule of its learning rate.
  `sgd`, `adam`, `adagrad`, `yogi` and `flower` have one each, with its equations. All are values: they know no arrays,
  rounds or journals.
* `stepping` steps the components of a round: it divides their sums, takes the optimizer's step and writes the new
  masters, in one pass over memory on all threads. `loops` are its kernels.

The same settings, updates and state give the same bits, compiled or not, on any number of threads, however components
are divided among calls and servers, and on every processor: each operation is rounded by itself, and is + - * / or a
square root.

To add one: a class with its equation, its loop in `loops` unless one fits already, a line in `OPTIMIZERS`, its message
in the proto, whose fields have the names of the settings, and its class in the client's `optim`.
"""

from collections.abc import Mapping
from typing import Any

from gradserve_server.parameters.optimizers.adagrad import Adagrad, AdagradOptax
from gradserve_server.parameters.optimizers.adam import Adam
from gradserve_server.parameters.optimizers.flower import FlowerAdagrad, FlowerAdam, FlowerAvgM, FlowerYogi
from gradserve_server.parameters.optimizers.optimizer import Optimizer
from gradserve_server.parameters.optimizers.sgd import Sgd
from gradserve_server.parameters.optimizers.yogi import Yogi

OPTIMIZERS: Mapping[str, type[Optimizer]] = {
    "sgd": Sgd,
    "adam": Adam,
    "adagrad": Adagrad,
    "yogi": Yogi,
    "flower_adam": FlowerAdam,
    "flower_yogi": FlowerYogi,
    "flower_adagrad": FlowerAdagrad,
    "flower_avg_m": FlowerAvgM,
    "adagrad_optax": AdagradOptax,
}
"""The optimizers by their names in records and in the contract."""

_NAMES = {kind: name for name, kind in OPTIMIZERS.items()}


def name_of(optimizer: Optimizer) -> str:
    """Returns the name of an optimizer in `OPTIMIZERS`."""
    return _NAMES[type(optimizer)]


def optimizer_record(optimizer: Optimizer) -> dict[str, Any]:
    """Converts an optimizer to values that JSON has; the reverse of `optimizer_of`."""
    return {"kind": name_of(optimizer), **vars(optimizer)}


def optimizer_of(record: Mapping[str, Any]) -> Optimizer:
    """Converts a record to an optimizer.

    Raises:
        InvalidArgumentError, KeyError, TypeError: It is no such record.
    """
    settings = dict(record)
    return OPTIMIZERS[settings.pop("kind")](**settings)
