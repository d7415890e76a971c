"""The operations of `Reducer`: by NumPy, and by kernels."""

from collections.abc import Callable
from dataclasses import dataclass

from gradserve_server.devices.host.kernel_table import Kernel
from gradserve_server.devices.host.reduction import with_numpy
from gradserve_server.devices.host.reduction.kernels import Kernels


@dataclass(frozen=True)
class Operation:
    """An operation on rows.

    Attributes:
        by_numpy: Computes it, given numbers and the arrays of a row.
        kernel: Returns its kernel, None if it has none.
        gradient: The index in a row of an array in the dtype of gradients.
        total: The index in a row of an array in the dtype of sums.
        is_easy: Returns True if NumPy computes it in one pass over arrays of one dtype, given the numbers.
    """

    by_numpy: Callable[..., None]
    kernel: Callable[[Kernels], Kernel | None]
    gradient: int
    total: int
    is_easy: Callable[..., bool] = lambda *numbers: True


SCALE = Operation(with_numpy.scale, lambda kernels: kernels.scale, gradient=0, total=1)
SCALE_IN_PLACE = Operation(with_numpy.scale_in_place, lambda kernels: None, gradient=0, total=0)
ADD_SCALED = Operation(
    with_numpy.add_scaled,
    lambda kernels: kernels.add_scaled,
    gradient=1,
    total=0,
    is_easy=lambda factor: factor == 1.0,
)
DIVIDE = Operation(with_numpy.divide, lambda kernels: kernels.divide, gradient=1, total=0)
DIVIDE_IN_PLACE = Operation(with_numpy.divide_in_place, lambda kernels: kernels.divide_in_place, gradient=0, total=0)
ADD_AND_DIVIDE = Operation(
    with_numpy.add_and_divide,
    lambda kernels: kernels.add_and_divide,
    gradient=1,
    total=0,
    is_easy=lambda factor, divisor: False,
)
ADD_AND_DIVIDE_IN_PLACE = Operation(
    with_numpy.add_and_divide_in_place,
    lambda kernels: kernels.add_and_divide_in_place,
    gradient=1,
    total=0,
    is_easy=lambda factor, divisor: False,
)
