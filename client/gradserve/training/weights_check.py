"""Compares the parameters of all workers of a training run by digests, which travel with every K-th gradient."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from gradserve.conversion.arrays import as_dtype
from gradserve.conversion.plain import as_integer
from gradserve.errors import AbortedError, InvalidArgumentError
from gradserve.results import ArrayLike, Average, DenseSpec, DifferentWorker
from gradserve_protocol.argument import Argument
from gradserve_protocol.digest import digest_of

_log = logging.getLogger(__name__)
_EVERY = Argument("compare_every")
_PARAMETERS = Argument("parameters")
_BYTES_PER_STEP = 4 << 20
"""The bytes that are read for digests at each step, in the mean, if nobody says how often: some 0.4 ms."""
_LEAST, _MOST = 10, 1000
_NUM_NAMED = 5

Compared = Callable[[], Mapping[str, ArrayLike] | None]
"""Returns a worker's parameters by name, in the memory of the host; None if they are not at hand."""


class WeightsCheck:
    """One worker's part in comparing parameters. The server compares, and its averages say who has others than most."""

    def __init__(self, run: str, worker_id: str, every: int, parameters: Compared, *, is_strict: bool) -> None:
        """Sends nothing yet.

        Args:
            run: The name of the run, for messages.
            worker_id: The id of the worker.
            every: Parameters are compared at each step that this divides.
            parameters: Returns this worker's.
            is_strict: Whether the worker ends with an error if its parameters are not those of most. Otherwise a
                warning is logged.
        """
        self._run = run
        self._worker_id = worker_id
        self._every = every
        self._parameters = parameters
        self._is_strict = is_strict
        self._different: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls,
        run: str,
        worker_id: str,
        every: int | None,
        parameters: Compared | None,
        specs: Sequence[ArrayLike | DenseSpec],
    ) -> "WeightsCheck | None":
        """Returns the check for the arguments of a worker; None if it is not to compare.

        Args:
            run: The name of the run.
            worker_id: The id of the worker.
            every: The argument `compare_every`.
            parameters: The argument `compared`.
            specs: The parameters, or what has their dtypes and shapes.

        Raises:
            InvalidArgumentError: An argument is not valid.
        """
        if every is None:
            return None if parameters is None else cls(run, worker_id, _usual(specs), parameters, is_strict=False)
        if not as_integer(every, _EVERY):
            return None
        if every < 0 or parameters is None:
            raise InvalidArgumentError(
                f"expected compare_every of at least 0, and compared with it, got {every} and "
                f"{'none' if parameters is None else 'one'}",
                field="compare_every",
            )
        return cls(run, worker_id, every, parameters, is_strict=True)

    def compares_at(self, step: int) -> bool:
        """Returns True if parameters are compared at a step."""
        return step % self._every == 0

    def to_send(self, step: int) -> bytes | None:
        """Returns the digest that travels with the gradient of a step; None for none."""
        parameters = self._parameters() if self.compares_at(step) else None
        if parameters is None:
            return None
        return digest_of([np.ascontiguousarray(parameters[name]) for name in sorted(parameters)])

    def look(self, step: int, average: Average) -> None:
        """Looks at what the round of a step has shown.

        Raises:
            AbortedError: This worker has other parameters than most, and the check is strict.
        """
        different = {each.worker_id: each for each in average.different_workers}
        own = different.get(self._worker_id)
        if own is not None and self._is_strict:
            raise AbortedError(
                f"at step {step} of training run {self._run!r}, worker {self._worker_id!r} has other parameters than "
                f"most of its {average.num_gradients} workers; {_since(own)}. Something but averages has changed them, "
                "or this worker has another optimizer, another schedule or other hardware. Start it again, so that it "
                "takes the state of another one",
                code="GS_WEIGHTS_DIFFER",
            )
        if different.keys() != self._different:
            self._log(step, list(different.values()))
        self._different = frozenset(different)

    def _log(self, step: int, different: Sequence[DifferentWorker]) -> None:
        if not different:
            _log.info("training run %r: at step %d, all workers have equal parameters again", self._run, step)
            return
        more = len(different) - _NUM_NAMED
        named = "; ".join(f"{each.worker_id!r} ({_since(each)})" for each in different[:_NUM_NAMED])
        _log.warning(
            "training run %r: at step %d, these workers have other parameters than most: %s%s. Something but averages "
            "has changed them, or they have another optimizer, another schedule or other hardware",
            self._run,
            step,
            named,
            f" and {more} more" if more > 0 else "",
        )


def _usual(specs: Sequence[ArrayLike | DenseSpec]) -> int:
    num_bytes = 0
    for spec in specs:
        described: Any = spec if hasattr(spec, "dtype") and hasattr(spec, "shape") else np.asarray(spec)
        num_bytes += math.prod(described.shape or ()) * as_dtype(described.dtype, _PARAMETERS).itemsize
    return min(max(_LEAST, -(-num_bytes // _BYTES_PER_STEP)), _MOST)


def _since(worker: DifferentWorker) -> str:
    return "never equal so far" if worker.equal_at is None else f"equal at step {worker.equal_at}"
