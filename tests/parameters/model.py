"""Parameters as plain Python numbers: what they are, and what they have promised, without memory, calls or disks."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Vector = list[float]
Update = Mapping[str, Vector]
"""The components that an update has."""


@dataclass(frozen=True)
class ModelRules:
    """The rules of a round: SGD or Adam, warm-up, and when it ends."""

    kind: Literal["sgd", "momentum", "adam"] = "sgd"
    lr: float = 0.5
    warmup: int = 0
    num_required: int = 2
    min_required: int = 2
    grace: float = 0.0
    deadline: float | None = None

    @property
    def slots(self) -> list[str]:
        return {"sgd": [], "momentum": ["buf"], "adam": ["m", "v"]}[self.kind]


@dataclass
class Optimizer:
    """The state of an optimizer: slots and count of each component."""

    kind: str
    slots: dict[str, dict[str, Vector]]
    steps: dict[str, int]

    @classmethod
    def new(cls, rules: ModelRules, values: Mapping[str, Vector]) -> "Optimizer":
        slots = {slot: {name: [0.0] * len(vector) for name, vector in values.items()} for slot in rules.slots}
        return cls(rules.kind, slots, dict.fromkeys(values, 0))

    def step(self, rules: ModelRules, factor: float, name: str, gradient: Vector, values: Vector) -> Vector:
        """Returns a component after a step, as PyTorch prints the equations."""
        self.steps[name] += 1
        count, lr = self.steps[name], rules.lr * factor
        if self.kind == "sgd":
            return [p - lr * g for p, g in zip(values, gradient, strict=True)]
        if self.kind == "momentum":
            buf = self.slots["buf"][name]
            buf[:] = gradient if count == 1 else [0.5 * b + g for b, g in zip(buf, gradient, strict=True)]
            return [p - lr * b for p, b in zip(values, buf, strict=True)]
        m, v = self.slots["m"][name], self.slots["v"][name]
        m[:] = [0.9 * a + (1 - 0.9) * g for a, g in zip(m, gradient, strict=True)]
        v[:] = [0.999 * a + (1 - 0.999) * g * g for a, g in zip(v, gradient, strict=True)]
        corrected = [(a / (1 - 0.9**count), (b / (1 - 0.999**count)) ** 0.5) for a, b in zip(m, v, strict=True)]
        return [p - lr * a / (root + 1e-8) for p, (a, root) in zip(values, corrected, strict=True)]


@dataclass(frozen=True)
class Joined:
    """An update of the round."""

    worker_id: str
    asked: float
    weight: float
    staleness: int
    update: Update


@dataclass(frozen=True)
class Made:
    """A version: its step, values and round."""

    step: int
    values: dict[str, Vector]
    round: int


@dataclass(frozen=True)
class Ended:
    """The expected record of a round."""

    step: int
    reason: str
    updates: tuple[tuple[str, float, float, int], ...]
    refused: int
    lr: float


MAX_STALENESS = 1
KEPT = 2


@dataclass
class Model:
    """One server's parameters.

    Attributes:
        expecting: The push_pulls that this round answers, whether they wait or gave up.
        kept_for: Push_pulls whose version is kept, as they may not have received it, with its round.
        answers: The rounds of push_pulls.
        overdue: Counts the rounds whose deadline has failed their waiters.
    """

    values: dict[str, Vector]
    rules: ModelRules
    now: float = 0.0
    step: int = 0
    round: int = 0
    first: float | None = None
    quorum: float | None = None
    applied_rounds: int = 0
    updates: list[Joined] = field(default_factory=list)
    refused_in_round: int = 0
    missing: set[str] = field(default_factory=set)
    versions: list[Made] = field(default_factory=list)
    records: list[Ended] = field(default_factory=list)
    accepted: float = 0.0
    applied: float = 0.0
    refused: dict[str, float] = field(default_factory=dict)
    expecting: set[int] = field(default_factory=set)
    kept_for: dict[int, int] = field(default_factory=dict)
    ended_rounds: dict[int, Made] = field(default_factory=dict)
    overdue: int = 0

    def __post_init__(self) -> None:
        self.next_rules = self.rules
        self.optimizer = Optimizer.new(self.rules, self.values)
        self.last_optimizer = self.optimizer
        self._keep(Made(self.step, deepcopy(self.values), self.round))
        self.round += 1

    @property
    def pending(self) -> float:
        return sum(each.weight for each in self.updates)

    @property
    def workers(self) -> set[str]:
        return {each.worker_id for each in self.updates} - {""}

    @property
    def num_named(self) -> int:
        return len(self.workers | self.missing) + sum(not each.worker_id for each in self.updates)

    @property
    def kept_rounds(self) -> set[int]:
        return {each.round for each in self.versions} | set(self.kept_for.values())

    def push(self, worker_id: str, weight: float, local_step: int, update: Update) -> tuple[str, int, float]:
        """Returns the outcome, the staleness, and the weight that counts."""
        staleness = self.step - local_step
        assert staleness >= 0
        outcome = "stale" if staleness > MAX_STALENESS else "accepted"
        if outcome == "accepted" and worker_id and worker_id in self.workers:
            outcome = "already counted"
        if outcome != "accepted":
            self.refused[outcome] = self.refused.get(outcome, 0.0) + weight
            self.refused_in_round += 1
            return outcome, staleness, 0.0
        counted = weight * 0.5**staleness
        self.updates.append(Joined(worker_id, weight, counted, staleness, update))
        self.accepted += counted
        self.missing.discard(worker_id)
        self.first = self.now if self.first is None else self.first
        if len(self.updates) == self.rules.num_required:
            self.quorum = self.now
        return outcome, staleness, counted

    def look(self) -> None:
        """Ends the round if its time has come."""
        if self.quorum is not None and self.now >= self.quorum + self.rules.grace:
            self._end("grace" if self.rules.grace else "required")
        elif (
            self.first is not None and self.rules.deadline is not None and self.now >= self.first + self.rules.deadline
        ):
            if len(self.updates) >= self.rules.min_required:
                self._end("deadline")
            else:
                self.overdue += 1
                self.first = self.now

    def _end(self, reason: str) -> None:
        rules = self.rules
        factor = 1.0
        if self.applied_rounds < rules.warmup:
            factor = (self.applied_rounds + 1) / (rules.warmup + 1)
        for name, values in self.values.items():
            present = [each for each in self.updates if name in each.update]
            if not present:
                continue
            total = sum(each.weight for each in present)
            mean = [
                sum(each.weight * each.update[name][place] for each in present) / total for place in range(len(values))
            ]
            self.values[name] = self.optimizer.step(rules, factor, name, [-each for each in mean], values)
        self.step += 1
        self.applied_rounds += 1
        self.applied += self.pending
        updates = tuple((each.worker_id, each.asked, each.weight, each.staleness) for each in self.updates)
        self.records.append(Ended(self.step, reason, updates, self.refused_in_round, rules.lr * factor))
        self.last_optimizer = self.optimizer
        for number in self.expecting:
            self.kept_for[number] = self.round
        self._begin()

    def _begin(self) -> None:
        """Begins the next round after a version was made."""
        self._keep(Made(self.step, deepcopy(self.values), self.round))
        self.round += 1
        self.missing = self.workers
        self.updates, self.expecting, self.refused_in_round = [], set(), 0
        self.first = self.quorum = None
        self._follow(self.next_rules)

    def _keep(self, made: Made) -> None:
        self.versions = [*self.versions, made][-KEPT:]
        self.ended_rounds[made.round] = made

    def _follow(self, rules: ModelRules) -> None:
        """Begins a round with other rules; their optimizer goes on with the state of the same one."""
        self.rules = self.next_rules = rules
        same = rules.kind == self.last_optimizer.kind
        self.optimizer = self.last_optimizer if same else Optimizer.new(rules, self.values)

    def change(self, **changes: Any) -> None:
        """Changes rules, at once if the round is empty."""
        self.next_rules = replace(self.next_rules, **changes)
        if not self.updates:
            self._follow(self.next_rules)

    def load(self, values: dict[str, Vector], step: int) -> None:
        """Goes on with other values and a new optimizer; drops the updates of the round."""
        if self.updates:
            self.refused["loaded"] = self.refused.get("loaded", 0.0) + self.pending
        self.values, self.step, self.applied_rounds = deepcopy(values), step, 0
        self.last_optimizer = Optimizer.new(self.next_rules, values)
        self._begin()

    def fork(self) -> "Model":
        """Returns new parameters with these values, rules and the state of the optimizer."""
        fork = Model(deepcopy(self.values), self.next_rules, self.now, self.step)
        if self.next_rules.kind == self.optimizer.kind:
            fork.optimizer = fork.last_optimizer = deepcopy(self.optimizer)
        fork.applied_rounds = self.applied_rounds
        return fork

    def heard_of(self, number: int, unanswered: set[int]) -> None:
        """A call arrives that says which earlier ones were answered."""
        for earlier in {*self.kept_for, *self.expecting}:
            if earlier < number and earlier not in unanswered:
                self.kept_for.pop(earlier, None)
                self.expecting.discard(earlier)

    @property
    def num_slot_vectors(self) -> int:
        """The number of slots in memory: those that the newest version has left, and new ones that are to follow."""
        count = len(self.last_optimizer.slots)
        if self.rules.kind != self.last_optimizer.kind:
            count += len(self.rules.slots)
        if self.next_rules.kind != self.rules.kind:
            count += len(self.next_rules.slots)
        return count
