"""The results of calls on parameters: versions, outcomes of pushes, descriptions, and the records of rounds."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from numpy.typing import NDArray

from gradserve.codecs import Codec
from gradserve.optim import Optimizer, Schedule
from gradserve.reductions import Reduction
from gradserve.results import DenseSpec, Outcome
from gradserve_protocol.errors import InvalidArgumentError
from gradserve_protocol.printing import abbreviated, first_items


@abbreviated
@dataclass(frozen=True, eq=False, repr=False)
class Version(Mapping[str, NDArray[Any]]):
    """Parameters as they were at one step: a mapping from component names to arrays.

    Attributes:
        step: The number of rounds that led to it: the local_step of updates that are computed from it.
        components: Arrays by name. Names of tied parameters have the same array.
        tree: The same arrays as a tree of the structure that the parameters were made of. `values` is it, too.
        digest: 32 hexadecimal digits. Versions with equal digests are equal, on every server.
        num_updates: The number of updates in the round that made it; 0 at step 0 and after a load.
        total_weight: The sum of their weights.
        worker_ids: The ids of the workers that sent them.
        codec: How it travelled; None: as it is. With a codec, the arrays are not quite those of the version, whose
            digest this still has; without one if it is sharded.
    """

    step: int
    components: Mapping[str, NDArray[Any]]
    tree: Any = field(repr=False)
    digest: str
    num_updates: int
    total_weight: float
    worker_ids: tuple[str, ...]
    codec: Codec | None = None

    @property
    def values(self) -> Any:
        """The arrays as a tree of the structure that the parameters were made of: a dict if that was one.

        In the place of the method of mappings; `version.components.values()` has the arrays alone.
        """
        return self.tree

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self.components[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.components)

    def __len__(self) -> int:
        return len(self.components)


@dataclass(frozen=True)
class PushResult:
    """The outcome of a push.

    Attributes:
        outcome: ACCEPTED; STALE if too many versions were made since `local_step`; or ALREADY_COUNTED if the round has
            an earlier update of the same worker.
        step: The step of the newest version right after the update was added.
        weight: The weight that counts: the given one, multiplied with the discount of stale updates. 0 if the update
            was dropped.
        staleness: The number of versions made since `local_step`.
        duplicate: Whether this is the answer to an earlier call with the same request_id.
        num_updates: The number of updates in the round after the call.
    """

    outcome: Outcome
    step: int
    weight: float
    staleness: int
    duplicate: bool
    num_updates: int


@abbreviated
@dataclass(frozen=True, repr=False)
class PushPull:
    """The outcome of a push_pull, and the version to go on from.

    Attributes:
        outcome: ACCEPTED; STALE if too many versions were made since `local_step`; or ALREADY_COUNTED if the round had
            an earlier update of the same worker instead.
        version: The version that the round made; if the update was stale, the newest one.
        weight: The weight that counted: the given one, multiplied with the discount of stale updates. 0 if the update
            was dropped.
        staleness: The number of versions made since `local_step`.
        duplicate: Whether this is the answer to an earlier call with the same request_id.
    """

    outcome: Outcome
    version: Version
    weight: float
    staleness: int
    duplicate: bool

    @property
    def step(self) -> int:
        """The step of the version: the local_step of the next update."""
        return self.version.step


@abbreviated
@dataclass(frozen=True, repr=False)
class Evaluation:
    """The measurements of a version.

    Attributes:
        step: The step of the version.
        metrics: The mean of each metric over the reports that have it, by their weights; NaN if one of them is.
        weight: The sum of the weights of all reports.
        worker_ids: The workers that have reported, in order of arrival.
        num_reports: The number of reports.
    """

    step: int
    metrics: Mapping[str, float]
    weight: float
    worker_ids: tuple[str, ...]
    num_reports: int


@dataclass(frozen=True)
class ReportResult:
    """The outcome of a report on a version.

    Attributes:
        outcome: ACCEPTED; or ALREADY_COUNTED if the worker has reported on the version before.
        step: The step of the version.
        metrics: The means over all reports on the version so far.
        num_reports: The number of these reports.
        duplicate: Whether this is the answer to an earlier call with the same request_id.
    """

    outcome: Outcome
    step: int
    metrics: Mapping[str, float]
    num_reports: int
    duplicate: bool


@dataclass(frozen=True)
class RoundRules:
    """The rules for the end of a round; see `Client.parameters`.

    Attributes:
        num_required: The number of updates that end a round.
        min_required: The number of updates that end it at its deadline; None: num_required.
        expected: The number of updates after which nobody else is waited for, "alive" for all workers that live, or
            None.
        grace: Seconds in which latecomers count after num_required updates, or "adaptive".
        max_grace: The longest adaptive grace, in seconds.
        min_interval: The shortest time between the ends of two rounds, in seconds.
        deadline: Seconds after the first update in which a round ends with min_required updates; None: never.
    """

    num_required: int = 1
    min_required: int | None = None
    expected: int | Literal["alive"] | None = None
    grace: float | Literal["adaptive"] = 0.0
    max_grace: float = 60.0
    min_interval: float = 0.0
    deadline: float | None = None


@abbreviated
@dataclass(frozen=True, repr=False)
class WeightLedger:
    """The weight of all updates: accepted = applied + pending + refused["loaded"].

    Attributes:
        accepted: The weight of all accepted updates.
        applied: That of updates in rounds that have ended.
        pending: That of updates in the current round.
        refused: The weight that does not count, by reason: "stale" and "already counted" of updates that were never
            accepted; "loaded" of those that were, until other values were loaded.
    """

    accepted: float
    applied: float
    pending: float
    refused: Mapping[str, float]


@abbreviated
@dataclass(frozen=True, repr=False)
class ParametersInfo:
    """The state and the properties of parameters at one moment.

    Attributes:
        container: The namespace of their name.
        name: Their name.
        step: The step of the newest version: the number of rounds applied.
        digest: The digest of the newest version.
        num_updates: The number of updates in the current round.
        num_waiting: The number of calls that wait for a version: of push_pull, read and wait.
        num_bytes: The memory of versions, optimizer state and updates.
        worker_ids: The ids of the workers with an update in the current round.
        kept_steps: The steps that can be read, the oldest first.
        is_private: Whether they are private to the client that made them, and deleted with it.
        idle_lease: Seconds without use after which they are deleted; None: never.
        incarnation: An id that distinguishes them from later parameters with the same name.
        components: The dtype and shape of each component, by name.
        update: What workers push: "delta" or "gradient".
        optimizer: The optimizer, of `gradserve.optim`; None if only newer clients know it.
        schedule: The schedule of its learning rate; None: constant.
        rules: The rules for the end of a round.
        max_staleness: The staleness up to which updates count.
        staleness: The discount of stale updates, as `Client.parameters` takes it.
        normalize: The divisor of a mean: "weights" or "count".
        reduction: The reduction of a round's updates, of `gradserve.reductions`.
        clip_norm: The norm to which longer updates are scaled; None: none.
        keep_versions: The number of versions that can be read.
        keep_rounds: The number of rounds whose records are kept.
        deterministic: Whether updates are summed in the order of worker ids.
        refuse_non_finite: Whether updates with infinities or NaN are refused.
        one_per_worker: Whether only the first update of each worker in a round counts.
        durability: What survives a crash of the server: "none", "round" or "gradient".
        agreement: The texts by name on which all who create or find them must agree.
        weights: The weight of all updates, accepted, applied and refused.
        num_shards: The number of servers over which they are sharded; 0 if they are on one. Sharded ones have no
            digest here, as no server has all values: `Version.digest` is that of the values.
    """

    container: str
    name: str
    step: int
    digest: str
    num_updates: int
    num_waiting: int
    num_bytes: int
    worker_ids: tuple[str, ...]
    kept_steps: tuple[int, ...]
    is_private: bool
    idle_lease: float | None
    incarnation: str
    components: Mapping[str, DenseSpec]
    update: str
    optimizer: Optimizer | None
    schedule: Schedule | None
    rules: RoundRules
    max_staleness: int
    staleness: str
    normalize: str
    reduction: Reduction
    clip_norm: float | None
    keep_versions: int
    keep_rounds: int
    deterministic: bool
    refuse_non_finite: bool
    one_per_worker: bool
    durability: str
    agreement: Mapping[str, str]
    weights: WeightLedger
    num_shards: int = 0


@dataclass(frozen=True)
class RoundUpdate:
    """An update in the record of a round.

    Attributes:
        worker_id: The sender's id.
        weight_asked: The weight that it was sent with.
        weight: The weight that counted.
        staleness: The number of versions made since its local_step.
        norm: Its L2 norm over all components, before `clip_norm`; None if it was not computed.
        cosine: The cosine of the angle to the reduced update; None if it was not computed.
        num_bytes: Its size.
        dropped: Whether the reduction left it out, or would have with report_only.
        metrics: What its worker has measured, by name.
    """

    worker_id: str
    weight_asked: float
    weight: float
    staleness: int
    norm: float | None
    cosine: float | None
    num_bytes: int
    dropped: bool
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Refusal:
    """An update that was refused while a round was open.

    Attributes:
        worker_id: The sender's id.
        weight: The weight that it was sent with.
        reason: "stale" or "already counted".
    """

    worker_id: str
    weight: float
    reason: str


@abbreviated
@dataclass(frozen=True, repr=False)
class RoundRecord:
    """The record of a round that was applied.

    Attributes:
        step: The step that it led to.
        reason: Why it ended: "required", "grace", "expected" or "deadline".
        end_time: When it ended, in seconds since 1970, by the server's clock.
        updates: Its updates.
        refusals: The updates that were refused meanwhile.
        digest_before: The digest of the version before it.
        digest_after: The digest of the version that it made.
        lr: The learning rate that counted, after the schedule.
        optimizer: The optimizer, of `gradserve.optim`; None if only newer clients know it.
        hash: The hash of this record and of the previous one's hash, 64 hexadecimal digits.
        metrics: The mean of each metric over the updates that have it, each with the weight that counted; NaN if one of
            them is. Of at most 32 names.
        evaluation: What was measured of the version that the round made; None if nobody has reported.
    """

    step: int
    reason: str
    end_time: float
    updates: tuple[RoundUpdate, ...]
    refusals: tuple[Refusal, ...]
    digest_before: str
    digest_after: str
    lr: float
    optimizer: Optimizer | None
    hash: str
    metrics: Mapping[str, float] = field(default_factory=dict)
    evaluation: Evaluation | None = None


class Unchanged:
    """The type of UNCHANGED."""

    _only: "Unchanged | None" = None

    def __new__(cls) -> "Unchanged":
        if cls._only is None:
            cls._only = super().__new__(cls)
        return cls._only

    def __repr__(self) -> str:
        return "UNCHANGED"

    def __reduce__(self) -> tuple[type["Unchanged"], tuple[()]]:
        return Unchanged, ()


UNCHANGED = Unchanged()
"""The value of arguments of `Parameters.change` that change nothing."""


def check_version(
    version: Mapping[str, NDArray[Any]],
    shapes: Mapping[str, tuple[int, ...]],
    *,
    needed: Iterable[str],
    also_known: Iterable[str] = (),
) -> None:
    """Checks that a version has the values that a model needs, of the model's shapes, and no others.

    Args:
        version: The version, or any mapping from names to arrays.
        shapes: The shapes of the model's parameters, by name.
        needed: The names of those that must be in the version.
        also_known: Further names that may be in it.

    Raises:
        InvalidArgumentError: It has other names or shapes.
    """
    known = {*shapes, *also_known}
    missing = [name for name in needed if name not in version]
    unknown = [name for name in version if name not in known]
    if missing or unknown:
        expected = f"values of {_names(missing)}" if missing else "values of the model's parameters alone"
        got = f"{'none, but ' if missing else ''}{_names(unknown)}" if unknown else "none"
        raise InvalidArgumentError(f"expected {expected}, got {got}: the version is of another model", field="version")
    for name, shape in shapes.items():
        got_shape = tuple(version[name].shape) if name in version else shape
        if got_shape != shape:
            raise InvalidArgumentError(
                f"expected shape {shape} of {name!r}, got {got_shape}: the version is of another model",
                field="version",
            )


def _names(names: list[str]) -> str:
    return first_items(map(repr, names), len(names))
