"""The step of an optimizer for the components of a round: mean, step and new masters in one pass over memory.

Lists are cut into chunks of about equal size, whatever the sizes of the components, and all threads share the chunks. A
compiled kernel computes what it can read; NumPy computes the rest, and everything until the kernel is prepared, in
blocks that stay in the cache. Every operation is rounded by itself, so the results depend neither on that nor on the
number of threads; only the bits of a NaN may.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from gradserve_server.devices.host.kernels import (
    ChunkedKernels,
    Declared,
    ForkJoin,
    Kernel,
    KernelTable,
    PreparedKernels,
    is_fit,
)
from gradserve_server.devices.host.reduction import Span, addresses, cut
from gradserve_server.parameters.optimizers.optimizer import (
    BFLOAT16_ADDEND,
    FLOAT16_ADDEND,
    NO_ADDEND,
    OWN_ADDEND,
    Array,
    Optimizer,
)
from gradserve_server.parameters.reductions.exact import ExactSums
from gradserve_server.parameters.unpacking.adder import PackedAdder

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class ComponentStep:
    """One component of a round. All arrays have one shape and are C-contiguous.

    The gradient is (total + addend factor) / divisor, in the dtype of the master, with the bits that a `Reducer` gives.

    Attributes:
        total: The sum of scaled updates, in the dtype of the master. None: the addend is the only update.
        addend: The last update, which is not in the sum: float16, bfloat16, or the dtype of the master. It may lie
            anywhere in a message. None: there is none.
        factor: The factor of the addend.
        divisor: The divisor of the sum.
        negate: Whether the updates are deltas: the gradient is negated.
        parameter: The master before the step, float32 or float64.
        slots: The slots of the optimizer, in the dtype of the master. They are updated in place.
        result: The master after the step: memory in the dtype of the master that is no other array's here.
        step: The number of rounds in which the component had an update, this one included.
    """

    total: Array | None
    addend: Array | None
    factor: float
    divisor: float
    negate: bool
    parameter: Array
    slots: tuple[Array, ...]
    result: Array
    step: int


@dataclass(frozen=True)
class Kernels(ChunkedKernels):
    """The kernel for one dtype of masters; see `loops`."""

    step: Kernel


OPTIMIZER_STEPS = KernelTable(
    what="steps of optimizers",
    package=__package__,
    kernels=Kernels,
    types={np.dtype(dtype): {"M": np.dtype(dtype).name} for dtype in (np.float32, np.float64)},
    declared={
        "step": Declared(
            "loops.step",
            "int64[2], int64[], int64[], int64, int64[], int64[], const {M}[2], {M}[], int16[], uint16[]",
        )
    },
    contract=False,
)

_ADDENDS = {np.dtype(np.float16): FLOAT16_ADDEND, np.dtype(ml_dtypes.bfloat16): BFLOAT16_ADDEND}
"""The codes of addends that do not have the dtype of their master."""

_CHUNK_ELEMENTS = 1 << 16
_NUMPY_CHUNKS = 8
"""The chunks that NumPy computes at once: threads that often give and take the GIL slow each other down."""
_NUMPY_BLOCK = 1 << 14
"""The elements that NumPy computes at once, so that intermediate results stay in the cache."""


class Stepper:
    """Takes the steps of optimizers on all cores. Safe to use from several threads.

    Attributes:
        packed: Adds up packed updates before.
        exact: Adds up squares before.
    """

    def __init__(self, parallel: ForkJoin, *, chunk_elements: int = _CHUNK_ELEMENTS) -> None:
        """Shares steps among the threads of `parallel`, each of which computes `chunk_elements` at a time."""
        self._parallel = parallel
        self._chunk_elements = chunk_elements
        self._kernels = PreparedKernels(OPTIMIZER_STEPS, loader=parallel.loader)
        self.packed = PackedAdder(parallel)
        self.exact = ExactSums(parallel.loader)

    def run_all(self, pieces: Sequence[Callable[[], object]]) -> None:
        """Calls independent functions on all cores, and returns when all have returned."""
        self._parallel.run_all(pieces)

    def map(self, function: Callable[[T], R], arguments: Iterable[T], /) -> Sequence[R]:
        """Calls a function for each of some arguments on all cores; returns the results in their order."""
        results: dict[int, R] = {}

        def call(index: int, argument: T) -> None:
            results[index] = function(argument)

        if pieces := [partial(call, *each) for each in enumerate(arguments)]:
            self.run_all(pieces)
        return [results[index] for index in range(len(pieces))]

    def prepare(self, stop: Callable[[], bool]) -> None:
        """Compiles the kernels, or loads them from a cache; ends early, between two kernels, once `stop()` is true."""
        self._kernels.prepare(stop)
        self.packed.prepare(stop)
        self.exact.prepare(stop)

    def step(self, optimizer: Optimizer, lr_factor: float, steps: Sequence[ComponentStep]) -> None:
        """Fills the results and updates the slots of components. Blocks until that is done.

        Call it outside of work that can be cancelled: a part of the slots would have been updated.

        Args:
            optimizer: The optimizer.
            lr_factor: The schedule's factor of the learning rate.
            steps: The components, in any order; each may be at another step.
        """
        assert all(len(each.slots) == len(optimizer.slots) for each in steps), "or the kernel would write elsewhere"
        numbers = {step: optimizer.numbers(step, lr_factor) for step in {each.step for each in steps}}
        compiled: dict[np.dtype[Any], list[ComponentStep]] = {}
        rest: list[ComponentStep] = []
        for each in steps:
            dtype = each.parameter.dtype
            has_kernel = self._kernels.get(dtype) is not None and all(map(is_fit, _arrays(each)))
            (compiled.setdefault(dtype, []) if has_kernel else rest).append(each)
        for alike in compiled.values():
            self._step_compiled(optimizer, numbers, alike)
        if rest:
            chunks = cut([each.result.size for each in rest], self._chunk_elements * _NUMPY_CHUNKS)
            self._parallel.run_all([partial(_step_by_numpy, optimizer, numbers, rest, chunk) for chunk in chunks])

    def _step_compiled(
        self, optimizer: Optimizer, numbers: dict[int, tuple[float, ...]], steps: Sequence[ComponentStep]
    ) -> None:
        """Steps components with masters of one dtype."""
        dtype = steps[0].parameter.dtype
        kernels = self._kernels.get(dtype)
        assert kernels is not None, "they were there before"
        chunks = cut([each.result.size for each in steps], self._chunk_elements)
        if not chunks:
            return
        spans, firsts = addresses([_row(each) for each in steps], chunks)
        owners = np.array([span.array for chunk in chunks for span in chunk], np.int64)
        has_sum = np.array([each.total is not None for each in steps], np.int64)
        addends = np.array([_addend_code(each) for each in steps], np.int64)
        table = _rounded([(each.factor, _divisor(each), *numbers[each.step]) for each in steps], dtype)
        like = np.empty(0, dtype), np.empty(0, np.int16), np.empty(0, np.uint16)
        arguments = (spans, firsts, owners, int(optimizer.loop.code), has_sum, addends, table, *like)
        kernels.run(self._parallel, kernels.step, arguments, len(chunks))


def _arrays(step: ComponentStep) -> tuple[Array, ...]:
    given = (step.total, step.addend, step.parameter, step.result, *step.slots)
    return tuple(array for array in given if array is not None)


def _row(step: ComponentStep) -> tuple[Array, ...]:
    """Returns the arrays whose addresses the kernel gets. The master stands for those that there are not."""
    own = step.parameter
    first, second = (*step.slots, own, own)[:2]
    total, addend = (own if array is None else array for array in (step.total, step.addend))
    return total, addend, own, step.result, first, second


def _addend_code(step: ComponentStep) -> int:
    if step.addend is None:
        return NO_ADDEND
    return OWN_ADDEND if step.addend.dtype == step.parameter.dtype else _ADDENDS[step.addend.dtype]


def _divisor(step: ComponentStep) -> float:
    """Returns the divisor that negates the quotient, too: a quotient is rounded to the same number with either sign."""
    return -step.divisor if step.negate else step.divisor


def _rounded(numbers: Any, dtype: np.dtype[Any]) -> NDArray[Any]:
    with np.errstate(all="ignore"):
        return np.asarray(numbers, np.float64).astype(dtype)


def _step_by_numpy(
    optimizer: Optimizer, numbers: dict[int, tuple[float, ...]], steps: Sequence[ComponentStep], spans: Sequence[Span]
) -> None:
    equation = optimizer.loop.by_numpy
    with np.errstate(all="ignore"):  # which is set per thread
        for which, begin, end in spans:
            step = steps[which]
            dtype = step.parameter.dtype
            own = list(_rounded(numbers[step.step], dtype))
            scales = _rounded((step.factor, _divisor(step)), dtype)
            for start in range(begin, end, _NUMPY_BLOCK):
                block = slice(start, min(start + _NUMPY_BLOCK, end))
                gradient = _gradient(step, block, *scales)
                slots = [slot.reshape(-1)[block] for slot in step.slots]
                equation(gradient, step.parameter.reshape(-1)[block], slots, step.result.reshape(-1)[block], own)


def _gradient(step: ComponentStep, block: slice, factor: Any, divisor: Any) -> Array:
    dtype = step.parameter.dtype
    if step.addend is None:
        assert step.total is not None, "there is an update"
        quotient: Array = np.divide(step.total.reshape(-1)[block], divisor)
        return quotient
    gradient: Array = np.multiply(step.addend.reshape(-1)[block], factor, dtype=dtype)
    if step.total is not None:
        np.add(step.total.reshape(-1)[block], gradient, out=gradient)
    np.divide(gradient, divisor, out=gradient)
    return gradient
