"""The rules of a run: when fragments synchronize, what an update weighs, and which components a fragment has."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias, TypedDict, get_args

from gradserve import optim, reductions
from gradserve.codecs import Codec, as_codec
from gradserve.conversion.plain import as_integer, as_number
from gradserve.data import Batches
from gradserve_protocol.argument import Argument
from gradserve_protocol.errors import InvalidArgumentError

Arrays: TypeAlias = Mapping[str, Any]
"""Arrays of a framework by name, in the memory of the host, which can be added and multiplied."""
Local: TypeAlias = Callable[[Collection[str]], Arrays]
"""Returns the present local values of some components."""
Weight: TypeAlias = Literal["tokens", "steps", "equal"] | Callable[[int, int], float]
OnFailure: TypeAlias = Literal["continue", "reset"]

_MOST_STEPS = range(1, 1 << 40)
_FRAGMENTS = Argument("fragments")
_DATA = Argument("data")


class RunOptions(TypedDict, total=False):
    """Arguments of `Client.parameters` that runs take, too."""

    min_required: int | None
    expected: int | Literal["alive"] | None
    grace: float | Literal["adaptive"]
    max_grace: float
    min_interval: float
    deadline: float | None
    max_staleness: int
    staleness: str
    normalize: str
    reduction: reductions.Reduction | str
    clip_norm: float | None
    schedule: optim.Schedule | None
    keep_versions: int
    keep_rounds: int
    deterministic: bool
    refuse_non_finite: bool
    idle_lease: float | None
    durability: str | None
    agreement: Mapping[str, str] | None
    sharded: bool


class Work(NamedTuple):
    """The work in an update: its tokens, as far as the program has counted them, and its inner steps."""

    tokens: int = 0
    steps: int = 0

    def plus(self, other: "Work") -> "Work":
        return Work(self.tokens + other.tokens, self.steps + other.steps)

    def minus(self, other: "Work") -> "Work":
        return Work(self.tokens - other.tokens, self.steps - other.steps)


@dataclass(frozen=True)
class Plan:
    """The turns of fragments, and the rules by which a worker goes on.

    Attributes:
        sync_every: The inner steps between two synchronizations of a fragment.
        num_fragments: The number of fragments, which take turns.
        delay: The inner steps between taking an update and loading the version that it led to.
        alpha: The part of the local values that stays when a version is loaded.
        weight: The weight of an update: its tokens, its steps, 1, or what a function of both returns.
        on_failure: What happens to local values when a synchronization fails; None: "continue", with data "reset".
        codec: How updates travel; None: as they are.
        codec_down: How versions travel; likewise.
        data: The samples of the worker, if the run shares them out.
    """

    sync_every: int
    num_fragments: int = 1
    delay: int = 0
    alpha: float = 0.0
    weight: Weight = "steps"
    on_failure: OnFailure | None = None
    codec: Codec | str | None = None
    codec_down: Codec | str | None = None
    data: Batches[Any] | None = None

    def __post_init__(self) -> None:
        """Checks the values.

        Raises:
            InvalidArgumentError: One is not valid; the message has the name that `DiLoCo` gives it.
        """
        sync_every = Argument("sync_every")
        as_integer(self.sync_every, sync_every, _MOST_STEPS)
        if self.sync_every % self.num_fragments:
            raise sync_every.error(f"a multiple of the number of fragments, {self.num_fragments},", self.sync_every)
        as_integer(self.delay, Argument("fragment_sync_delay"), range(self.sync_every))
        alpha = Argument("fragment_update_alpha")
        if not 0 <= as_number(self.alpha, alpha) <= 1:
            raise alpha.error("a number from 0 to 1", self.alpha)
        if not callable(self.weight) and self.weight not in ("tokens", "steps", "equal"):
            raise Argument("weight").error("'tokens', 'steps', 'equal' or a function of tokens and steps", self.weight)
        if self.on_failure not in (None, *get_args(OnFailure)):
            raise Argument("on_failure").error("'continue' or 'reset'", self.on_failure)
        as_codec(self.codec, Argument("codec"))
        as_codec(self.codec_down, Argument("codec_down"), of_version=True)
        if self.data is not None:
            self._check_data(self.data)

    def _check_data(self, data: Batches[Any]) -> None:
        """Checks that each update is of the samples of its round, and of no others."""
        if not isinstance(data, Batches):
            raise _DATA.error("what gradserve.data.sampler or stream has returned", data)
        if data.batches_per_step % self.sync_every:
            expected = f"batches_per_step to be sync_every, {self.sync_every}, or a multiple of it,"
            raise _DATA.error_saying(expected, str(data.batches_per_step))
        needed = {
            "fragments": (self.num_fragments, 1, "one fragment"),
            "fragment_sync_delay": (self.delay, 0, "no delay"),
            "fragment_update_alpha": (self.alpha, 0, "0"),
            "on_failure": (self.on_failure or "reset", "reset", "'reset'"),
        }
        for name, (given, value, words) in needed.items():
            if given != value:
                raise Argument(name).error(f"{words} with data, so that each sample counts once,", given)

    @property
    def resets(self) -> bool:
        """True if a worker goes back to the version that it had when a synchronization fails."""
        return self.on_failure == "reset" or self.data is not None

    @property
    def period(self) -> int:
        """The inner steps between two synchronizations, of whichever fragment."""
        return self.sync_every // self.num_fragments

    def is_due(self, num_taken: int) -> bool:
        """Returns True if a synchronization may begin or end after this step, of those that a worker has taken."""
        return not (num_taken % self.period and (num_taken + self.delay) % self.period)

    def weight_of(self, work: Work) -> float:
        """Returns the weight of an update.

        Raises:
            InvalidArgumentError: It goes by tokens, and none were counted.
        """
        if callable(self.weight):
            return self.weight(work.tokens, work.steps)
        if self.weight == "equal":
            return 1.0
        if self.weight == "tokens" and not work.tokens:
            raise Argument("weight").error_saying("count(tokens=...) in each step, for weight='tokens'", "no tokens")
        return float(work.tokens if self.weight == "tokens" else work.steps)


def fragments_of(sizes: Mapping[str, int], fragments: Any) -> list[list[str]]:
    """Returns the names of the components in each fragment.

    Args:
        sizes: The bytes of each component, by name.
        fragments: None for one fragment; their number, by which components are divided by size; or lists of names.

    Raises:
        InvalidArgumentError: There are fewer components than fragments; or a name is unknown, missing, or in two
            fragments.
    """
    if fragments is None:
        return [list(sizes)]
    return _by_size(sizes, fragments) if isinstance(fragments, int) else _by_name(sizes, fragments)


def _by_size(sizes: Mapping[str, int], number: int) -> list[list[str]]:
    """Divides components into fragments of about the same size: each, the greatest first, to the smallest fragment."""
    as_integer(number, _FRAGMENTS, range(1, 1 << 16))
    if len(sizes) < number:
        raise _FRAGMENTS.error(f"at most {len(sizes)}, the number of components,", number)
    sums, members = [0] * number, [set[str]() for _ in range(number)]
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        smallest = min(range(number), key=lambda index: (sums[index], index))
        sums[smallest] += sizes[name]
        members[smallest].add(name)
    return [[name for name in sizes if name in each] for each in members]


def _by_name(names: Collection[str], fragments: Any) -> list[list[str]]:
    """Returns lists of names that together are all names, each once."""
    if isinstance(fragments, str) or not all(isinstance(each, list | tuple) for each in fragments) or not fragments:
        raise _FRAGMENTS.error("a number, or lists of names or modules", fragments)
    given = Counter(name for each in fragments for name in each)
    if given != Counter(list(names)) or not all(fragments):
        raise InvalidArgumentError(
            f"expected each parameter of the model in one fragment, and no empty one, got fragments {fragments!r} for "
            f"{', '.join(names)}",
            field="fragments",
        )
    return [list(each) for each in fragments]
