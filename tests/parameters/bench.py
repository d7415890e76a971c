"""The core of parameters for tests: no socket, no thread, a clock of our own."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gradserve_server.accumulators.factory import AccumulatorFactory
from gradserve_server.accumulators.gradient import Contribution, Gradient, OpenGradient
from gradserve_server.accumulators.identity import RequestId
from gradserve_server.accumulators.places.place import HostPlace, Places
from gradserve_server.accumulators.rounds import Pushed
from gradserve_server.accumulators.spec import ComponentSpec, PartialShape
from gradserve_server.config import LimitsConfig
from gradserve_server.devices.compute import InlineCompute
from gradserve_server.devices.host.kernels import ForkJoin
from gradserve_server.devices.host.reduction import Reducer
from gradserve_server.parameters.journal import ParametersJournals
from gradserve_server.parameters.optimizers.adam import Adam
from gradserve_server.parameters.optimizers.optimizer import Optimizer, Schedule
from gradserve_server.parameters.optimizers.sgd import Sgd
from gradserve_server.parameters.optimizers.stepping import Stepper
from gradserve_server.parameters.parameters import Parameters
from gradserve_server.parameters.registry import ParametersRegistry
from gradserve_server.parameters.round_rules import RoundRules
from gradserve_server.parameters.spec import ParametersSpec, Rules
from gradserve_server.parameters.variables import Loaded
from gradserve_server.parameters.versions import Version
from gradserve_server.resources.budget import Budget
from gradserve_server.resources.cluster import Member
from gradserve_server.resources.lifetimes import SHARED, Lifetime, Lifetimes
from gradserve_server.resources.registry import ResourceKey
from gradserve_server.security.identity import ShareRules

KEY = ResourceKey("test", "p")
Values = Mapping[str, Sequence[float] | np.ndarray]


def arrays(values: Values, dtype: Any = np.float32) -> dict[str, np.ndarray]:
    """Returns values as arrays; arrays stay as they are."""
    return {name: value if isinstance(value, np.ndarray) else np.array(value, dtype) for name, value in values.items()}


def sgd(lr: float = 1.0, momentum: float = 0.0) -> Sgd:
    """Returns SGD with PyTorch's defaults."""
    return Sgd(lr, momentum, dampening=0.0, weight_decay=0.0, nesterov=False)


def adam(lr: float) -> Adam:
    """Returns Adam with PyTorch's defaults."""
    return Adam(lr, 0.9, 0.999, 1e-8, weight_decay=0.0, decoupled=False)


def opened(values: Values, *, owned: bool = False) -> OpenGradient:
    """Returns an update as an arrived call has it."""
    return lambda use: use(Gradient(arrays(values), owned=owned))


def components_of(values: Mapping[str, np.ndarray]) -> tuple[ComponentSpec, ...]:
    """Returns the specs of components of these dtypes and shapes."""
    return tuple(ComponentSpec(name, value.dtype, PartialShape(value.shape)) for name, value in values.items())


class ParametersBench:
    """A registry with all that it needs, to be looked at.

    Attributes:
        now: The clock, in seconds.
    """

    def __init__(
        self,
        *,
        journals: ParametersJournals | None = None,
        limit: int = 1 << 40,
        arithmetic: tuple[Reducer, Stepper] | None = None,
        member: Member | None = None,
        **limits: Any,
    ) -> None:
        self.now = 1000.0
        self.memory = Budget(limit, "bytes of tensor memory", ShareRules())
        self.bookkeeping = Budget(1 << 40, "bytes of bookkeeping", ShareRules())
        self.lifetimes = Lifetimes(lambda: self.now, 60.0)
        parallel = ForkJoin(1)
        reducer, stepper = arithmetic or (Reducer(parallel), Stepper(parallel))
        host = HostPlace("cpu", reducer, np.empty, InlineCompute(), self.memory)
        self.factory = AccumulatorFactory(
            places=Places(host),
            bookkeeping=self.bookkeeping,
            limits=LimitsConfig(**limits),
            lifetimes=self.lifetimes,
        )
        self.registry = ParametersRegistry(
            self.factory,
            self.lifetimes,
            stepper,
            new_incarnation=map(str, itertools.count()).__next__,
            journals=journals,
            wall_clock=lambda: int(self.now * 1e9),
            member=member,
        )

    async def parameters(
        self,
        values: Values | None = None,
        *,
        key: ResourceKey = KEY,
        optimizer: Optimizer | None = None,
        schedule: Schedule | None = None,
        lifetime: Lifetime = SHARED,
        loaded: Loaded | None = None,
        rounds: Mapping[str, Any] | None = None,
        **spec: Any,
    ) -> Parameters:
        """Returns parameters; by default of one component "w" with two zeros, and SGD with lr 1."""
        initial = arrays({"w": [0, 0]} if values is None else values)
        rules = Rules(optimizer or sgd(), RoundRules(**rounds or {"num_required": 1}), schedule or Schedule())
        made, _ = await self.registry.create(
            key, ParametersSpec(components_of(initial), rules, **spec), lifetime, loaded or Loaded(initial)
        )
        return made


async def push(
    parameters: Parameters,
    update: Values,
    local_step: int | None = None,
    *,
    call: RequestId | None = None,
    **contribution: Any,
) -> Pushed:
    """Pushes an update from the newest version, or from another step."""
    step = parameters.state.step if local_step is None else local_step
    applied, _ = await parameters.push(call, Contribution(local_step=step, **contribution), opened(update))
    return applied


def shown(version: Version) -> dict[str, list[float]]:
    """Returns the values of a version as lists."""
    return {name: np.asarray(value, np.float64).tolist() for name, value in version.values.items()}
