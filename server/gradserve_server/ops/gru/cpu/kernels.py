"""The kernels of GRUBlockCell on the host: their arguments; see `loops` and `one_sequence` for what they do."""

from dataclasses import dataclass

from gradserve_server.devices.host.kernel_table import ELEMENTS, ChunkedKernels, Declared, Kernel, KernelTable
from gradserve_server.ops.dtypes import BFLOAT16, FLOAT16, FLOAT32, FLOAT64


@dataclass(frozen=True)
class Kernels(ChunkedKernels):
    """The kernels for float32 or float64; see `loops` and `one_sequence`."""

    cell_of_one: Kernel
    gates: Kernel
    state: Kernel
    gradient_of_state: Kernel
    gradient_of_reset: Kernel
    gradient_of_inputs: Kernel


@dataclass(frozen=True)
class Conversions(ChunkedKernels):
    """The kernels between a dtype of 16 bits and float32."""

    to_float32: Kernel
    from_float32: Kernel


def _arguments(inputs: int, sizes: int, outputs: int) -> str:
    return ", ".join(["const {T}[]"] * inputs + ["int64"] * sizes + ["{T}[]"] * outputs)


GRU_BLOCK_CELL = KernelTable(
    what="GRUBlockCell",
    package=__package__,
    kernels=Kernels,
    types={dtype: {"T": ELEMENTS[dtype]} for dtype in (FLOAT32, FLOAT64)},
    declared={
        "cell_of_one": Declared(
            "one_sequence.cell_of_one", f"{_arguments(6, 2, 0)}, {{T}}[2], {{T}}[2], {_arguments(0, 0, 5)}"
        ),
        "gates": Declared("loops.gates", _arguments(4, 3, 3)),
        "state": Declared("loops.state", _arguments(5, 3, 2)),
        "gradient_of_state": Declared("loops.gradient_of_state", _arguments(4, 3, 2)),
        "gradient_of_reset": Declared("loops.gradient_of_reset", _arguments(3, 4, 1)),
        "gradient_of_inputs": Declared("loops.gradient_of_inputs", _arguments(5, 4, 2)),
    },
)

CONVERSIONS = KernelTable(
    what="GRUBlockCell",
    package=__package__,
    kernels=Conversions,
    types={dtype: {"T": ELEMENTS[dtype]} for dtype in (BFLOAT16, FLOAT16)},
    declared={
        "to_float32": Declared("loops.convert", "const {T}[], int64, float32[]"),
        "from_float32": Declared("loops.convert", "const float32[], int64, {T}[]"),
    },
)
