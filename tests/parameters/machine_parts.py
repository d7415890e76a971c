"""The properties, updates and rules that the state machine of parameters draws from, and its journal."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

from gradserve_server.accumulators.gradient import Contribution
from gradserve_server.accumulators.ledger import Event
from gradserve_server.parameters.journal import PARAMETERS
from gradserve_server.parameters.optimizers.optimizer import Optimizer, Schedule
from gradserve_server.parameters.round_rules import ExponentialDiscount, RoundRules, Staleness
from gradserve_server.parameters.spec import ParametersSpec, Rules
from gradserve_server.parameters.variables import Variables
from gradserve_server.resources.registry import ResourceKey
from gradserve_server.security.identity import Identity
from gradserve_server.storage.journal import Record
from tests.journals import EventJournal
from tests.parameters.bench import adam, components_of, sgd
from tests.parameters.model import MAX_STALENESS, ModelRules

KEY = ResourceKey("test", "p", Identity("chief"))
FORK = ResourceKey("test", "fork", Identity("chief"))
DTYPES: Mapping[str, Any] = {"w": np.float64, "b": np.float32, "h": ml_dtypes.bfloat16}
SIZES = {"w": 2, "b": 1, "h": 2}
MASTER_BYTES = {"w": 16, "b": 4, "h": 8}
NARROW_BYTES = 8
VERSION_BYTES = 16 + 4 + 4
TOLERANCE = {"w": 1e-12, "b": 1e-5, "h": 2**-8}

numbers = st.integers(-4, 4)
updates = st.fixed_dictionaries(
    {}, optional={name: st.lists(numbers, min_size=size, max_size=size) for name, size in SIZES.items()}
).filter(bool)
values = st.fixed_dictionaries({name: st.lists(numbers, min_size=size, max_size=size) for name, size in SIZES.items()})
weights = st.sampled_from([1.0, 2.0, 0.5])
workers = st.sampled_from(["", "w0", "w1", "w2"])
behind = st.sampled_from([0, 0, 0, 1, 2])
ROUND_RULES: list[dict[str, Any]] = [
    {"num_required": 1, "min_required": 1, "grace": 0.0, "deadline": None},
    {"num_required": 2, "min_required": 2, "grace": 0.0, "deadline": None},
    {"num_required": 3, "min_required": 2, "grace": 0.0, "deadline": 6.0},
    {"num_required": 3, "min_required": 3, "grace": 0.0, "deadline": 1.0},
    {"num_required": 1, "min_required": 1, "grace": 4.0, "deadline": None},
    {"num_required": 2, "min_required": 2, "grace": 2.0, "deadline": 8.0},
]


def arrays(update: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {name: np.array(each).astype(DTYPES[name]) for name, each in update.items()}


def optimizer_of(rules: ModelRules) -> Optimizer:
    if rules.kind == "adam":
        return adam(rules.lr)
    return sgd(rules.lr, momentum=0.5 if rules.kind == "momentum" else 0.0)


def rounds_of(rules: ModelRules) -> RoundRules:
    least = rules.min_required if rules.deadline is not None else None
    return RoundRules(rules.num_required, least, grace=rules.grace, deadline=rules.deadline)


def spec_of(rules: ModelRules) -> ParametersSpec:
    components = components_of(arrays({name: [0] * size for name, size in SIZES.items()}))
    return ParametersSpec(
        components,
        Rules(optimizer_of(rules), rounds_of(rules), Schedule(warmup=rules.warmup)),
        staleness=Staleness(MAX_STALENESS, ExponentialDiscount(0.5)),
    )


class Recorder(EventJournal[Event]):
    """Lists the records of events."""

    variables: Variables

    def __init__(self) -> None:
        self.records: list[Record] = []

    async def append(self, event: Event) -> None:
        self.records.append(json.loads(json.dumps(PARAMETERS.event_record(event))))

    async def reserve_version(self, optimizer: object) -> None: ...
    def forget_rounds(self, steps: object) -> None: ...


@dataclass(frozen=True)
class Sent:
    """A call with an update, and its outcome."""

    contribution: Contribution
    update: Mapping[str, Any]
    is_pull: bool
    answer: tuple[str, int, float]
    round: int
