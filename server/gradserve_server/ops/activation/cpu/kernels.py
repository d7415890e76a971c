"""The kernels of activation functions on the host: their arguments; see `loops` for what they do."""

from dataclasses import dataclass

from gradserve_server.devices.host.kernel_table import ChunkedKernels, Declared, Kernel, KernelTable
from gradserve_server.ops.dtypes import FLOAT32, FLOAT64


@dataclass(frozen=True)
class Kernels(ChunkedKernels):
    """The kernels that compute with float32 or float64; see `loops`."""

    forward: Kernel
    gradient: Kernel


IN_FLOAT32 = KernelTable(
    what="activation functions",
    package=__package__,
    kernels=Kernels,
    types={FLOAT32: {}},
    declared={
        "forward": Declared("loops.forward_float32", "int64, int64, const uint8[], int64, int64, uint8[]"),
        "gradient": Declared(
            "loops.gradient_float32", "int64, int64, const uint8[], const uint8[], int64, int64, uint8[]"
        ),
    },
)

IN_FLOAT64 = KernelTable(
    what="activation functions",
    package=__package__,
    kernels=Kernels,
    types={FLOAT64: {}},
    declared={
        "forward": Declared("loops.forward_float64", "int64, const float64[], int64, float64[]"),
        "gradient": Declared("loops.gradient_float64", "int64, const float64[], const float64[], int64, float64[]"),
    },
)
