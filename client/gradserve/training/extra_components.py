"""Components that travel beside the gradients: which parameters had a gradient, and digests of the parameters.

An average that is zero everywhere does not say whether nobody had a gradient, or those of all workers were zero. An
optimizer with weight decay or momentum has to know.

"""

import hashlib
import logging
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradserve.conversion.plain import as_integer
from gradserve.errors import AbortedError, InvalidArgumentError
from gradserve.results import DenseSpec
from gradserve_protocol.argument import Argument

_log = logging.getLogger(__name__)
DIGESTS = "gradserve/digests"
"""The component: a one in the place of the digest, so that the average has the share of each digest in the round."""
_NUM_PLACES = 256
"""Two digests that differ are in one place once in so many times; then the next check finds out."""
_ROUNDING = 1e-5
"""Shares that differ by less are equal: they are sums of weights in float32."""
DIGESTS_SPEC = DenseSpec("float32", (_NUM_PLACES,))
PRESENCE = "gradserve/present"
"""The component that says so: 1 for each parameter with a gradient, 0 for each without one, in their order."""


class WeightsCheck:
    """One worker's part in comparing parameters at every K-th step."""

    def __init__(
        self, run: str, worker_id: str, every: int, parameters: Callable[[], Mapping[str, Any] | None]
    ) -> None:
        """Takes the names of the run and the worker, and how often to compare.

        Args:
            run: The name of the run.
            worker_id: The id of the worker.
            every: Parameters are compared at each step that this divides.
            parameters: Returns this worker's parameters as arrays of bytes by name, None if they are not at hand.
        """
        self._run = run
        self._worker_id = worker_id
        self._every = every
        self._parameters = parameters
        self._place: int | None = None
        self._equal_at: int | None = None

    @classmethod
    def of(
        cls, run: str, worker_id: str, every: int, parameters: Callable[[], Mapping[str, Any] | None] | None
    ) -> "WeightsCheck | None":
        """Returns the check for the arguments of a worker; None if it is not to compare.

        Raises:
            InvalidArgumentError: An argument is not valid.
        """
        if not as_integer(every, Argument("compare_every")):
            return None
        if every < 0 or parameters is None:
            raise InvalidArgumentError(
                f"expected compare_every of at least 0, and compared with it, got {every} and "
                f"{'none' if parameters is None else 'one'}",
                field="compare_every",
            )
        return cls(run, worker_id, every, parameters)

    def to_send(self, step: int) -> NDArray[np.float32]:
        """Returns what travels with the gradient of a step."""
        sent = np.zeros(_NUM_PLACES, np.float32)
        parameters = self._parameters() if step % self._every == 0 else None
        self._place = None if parameters is None else _place_of(parameters)
        if self._place is not None:
            sent[self._place] = 1
        return sent

    def check(self, step: int, average: Mapping[str, NDArray[Any]]) -> None:
        """Compares this worker's digest with those of the round of a step, in which its gradient was.

        Raises:
            AbortedError: Others have the same parameters as each other, and this worker has others.
        """
        if self._place is None:
            return
        shares = np.asarray(average[DIGESTS])
        own, others = float(shares[self._place]), float(shares.sum() - shares[self._place])
        if others <= _ROUNDING:
            self._equal_at = step
            return
        since = (
            "they have not been equal since it began"
            if self._equal_at is None
            else (f"they were equal at step {self._equal_at}")
        )
        most = float(np.delete(shares, self._place).max())
        if own > most + _ROUNDING:
            _log.error(
                "training run %r: at step %d, %.0f %% of the round had other parameters than worker %r, which has "
                "those of most; %s",
                self._run,
                step,
                100 * others,
                self._worker_id,
                since,
            )
            return
        raise AbortedError(
            f"at step {step} of training run {self._run!r}, worker {self._worker_id!r} has other parameters than "
            f"{others:.0%} of the round; {since}. Something but averages has changed them, or this worker has another "
            "optimizer, another schedule or other hardware. Start it again, so that it takes the state of another one"
        )


def _place_of(parameters: Mapping[str, Any]) -> int:
    digest = hashlib.blake2b(digest_size=8)
    for name in sorted(parameters):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(parameters[name]).reshape(-1).view(np.uint8).data)
    return int.from_bytes(digest.digest()) % _NUM_PLACES


def presence_spec(num_parameters: int) -> DenseSpec:
    """Returns the component for a number of parameters."""
    return DenseSpec("float32", (num_parameters,))


def presence_of(names: Sequence[str], present: Container[str]) -> NDArray[np.float32]:
    """Returns what a worker sends: float32, [number of names], 1 for those that are present and 0 for the others."""
    return np.asarray([name in present for name in names], np.float32)


def present_names(names: Sequence[str], average: Mapping[str, NDArray[Any]]) -> frozenset[str]:
    """Returns the names of the parameters of which at least one worker of a round had a gradient."""
    return frozenset(name for name, share in zip(names, average[PRESENCE], strict=True) if share > 0)
