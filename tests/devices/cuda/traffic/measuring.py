"""What computations on a GPU move, and the fewest bytes that would do."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gradserve_server.devices.cuda.programs import Limits, Program
from gradserve_server.devices.cuda.reduction import CudaReducer
from gradserve_server.ops.activation.cuda import CudaActivation
from gradserve_server.ops.batch_norm.cuda import CudaBatchNorm
from gradserve_server.ops.batch_norm.spec import plan_forward, plan_gradient
from gradserve_server.ops.layer_norm.cuda import CudaLayerNorm
from gradserve_server.ops.layer_norm.spec import Geometry
from gradserve_server.tensors.spec import FLOAT16, FLOAT32
from tests.devices.cuda.emulation.device import H200
from tests.devices.cuda.traffic.counting import CountingDevice, Traffic
from tests.ops.batch_norm.cuda.cases import Case, forward_case, gradient_case
from tests.ops.layer_norm.random_calls import ATTRIBUTES, make_inputs

TWO_PASSES = Limits(num_multiprocessors=8, shared_bytes=0)
"""A GPU on which no tile fits into shared memory, so that small arrays show how large ones are computed."""
SMALL, LARGE = (8, 14, 14, 64), (16, 28, 28, 32)
"""Images whose batch fits into shared memory, and others."""
NUM_HELD = 8

DType = np.dtype[Any]


class Ran(NamedTuple):
    """The inputs of a computation, and its outputs."""

    inputs: Sequence[Any]
    outputs: Sequence[Any]


@dataclass(frozen=True)
class Computation:
    """A computation whose traffic is measured.

    Attributes:
        name: Its name.
        dtype: The dtype of its large arrays.
        run: Runs it on a device.
        most: How many times the fewest bytes it may move.
        limits: The properties of the device.
    """

    name: str
    dtype: DType
    run: Callable[[CountingDevice], Ran]
    most: float
    limits: Limits = H200

    def __str__(self) -> str:
        return f"{self.name}, {self.dtype}"


@dataclass(frozen=True)
class Measured:
    """The traffic of a computation.

    Attributes:
        launches: What each of its launches has moved.
        fewest: The bytes of its inputs and outputs, each moved once.
        programs: The programs of its kernels, by kernel.
    """

    launches: Sequence[Traffic]
    fewest: int
    programs: Mapping[str, Program]

    @property
    def ratio(self) -> float:
        """How many times the fewest bytes it moves."""
        return sum(launch.moved for launch in self.launches) / self.fewest


def measure(computation: Computation, folder: Path) -> Measured:
    """Runs a computation, compiled in a folder."""
    device = CountingDevice(folder, computation.limits)
    ran = computation.run(device)
    device.check_margins()
    fewest = sum(array.nbytes for array in (*ran.inputs, *ran.outputs))
    return Measured(device.traffic, fewest, device.programs)


def _arrays(values: Any) -> list[Any]:
    return [array for array in vars(values).values() if array is not None]


def _batch_norm(
    images: tuple[int, ...], data_format: str, dtype: DType, *, is_gradient: bool
) -> Callable[[CountingDevice], Ran]:
    batch, height, width, channels = images
    shape = images if data_format == "NHWC" else (batch, channels, height, width)

    def run(device: CountingDevice) -> Ran:
        family, case = CudaBatchNorm(device), Case(shape, data_format)
        if is_gradient:
            gradient = gradient_case(case, dtype, device.from_host)
            geometry = plan_gradient(gradient.inputs, gradient.attributes).geometry
            outputs: Any = family.gradient(gradient.inputs, gradient.attributes, geometry)
            return Ran(_arrays(gradient.inputs), _arrays(outputs))
        forward = forward_case(case, dtype, device.from_host)
        geometry = plan_forward(forward.inputs, forward.attributes).geometry
        outputs = family.forward(forward.inputs, forward.attributes, geometry)
        return Ran(_arrays(forward.inputs), _arrays(outputs))

    return run


def _layer_norm(dtype: DType, *, is_gradient: bool) -> Callable[[CountingDevice], Ran]:
    groups, size = 512, 256

    def run(device: CountingDevice) -> Ran:
        family, geometry = CudaLayerNorm(device), Geometry((groups,), size)
        inputs, grad_inputs = make_inputs(groups, size, dtype)
        given: Any = grad_inputs if is_gradient else inputs
        there = type(given)(**{name: device.from_host(array) for name, array in vars(given).items()})
        outputs: Any = family.gradient(there, geometry) if is_gradient else family.forward(there, ATTRIBUTES, geometry)
        return Ran(_arrays(there), _arrays(outputs))

    return run


def _activation(dtype: DType) -> Callable[[CountingDevice], Ran]:
    def run(device: CountingDevice) -> Ran:
        x = device.from_host(np.linspace(-3, 3, 1 << 16).astype(dtype))
        out = device.empty(x.shape, dtype)
        CudaActivation(device).forward("tanh", x, out)
        return Ran([x], [out])

    return run


def _components(device: CountingDevice, dtype: DType) -> list[Any]:
    return [device.from_host(np.ones(size, dtype)) for size in (1 << 15, 1 << 14, 1000, 3)]


def _added(dtype: DType) -> Callable[[CountingDevice], Ran]:
    def run(device: CountingDevice) -> Ran:
        totals, gradient = _components(device, FLOAT32), _components(device, dtype)
        CudaReducer(device).add_scaled(totals, gradient, 0.5)
        return Ran([*totals, *gradient], totals)

    return run


def _ended(dtype: DType) -> Callable[[CountingDevice], Ran]:
    def run(device: CountingDevice) -> Ran:
        totals, gradient, outs = (_components(device, each) for each in (FLOAT32, dtype, dtype))
        CudaReducer(device).add_and_divide(totals, gradient, 0.5, 3.0, outs)
        return Ran([*totals, *gradient], outs)

    return run


def _ordered(dtype: DType) -> Callable[[CountingDevice], Ran]:
    def run(device: CountingDevice) -> Ran:
        held = [_components(device, dtype) for _ in range(NUM_HELD)]
        totals = _components(device, FLOAT32)
        dtypes = [FLOAT32] * len(totals)
        CudaReducer(device).add_up(held, [1.0] * NUM_HELD, float(NUM_HELD), dtypes, None, totals)
        return Ran([array for each in held for array in each], totals)

    return run


def computations(dtypes: Iterable[DType] = (FLOAT32, FLOAT16)) -> list[Computation]:
    """Returns what is measured."""
    found = []
    for dtype in dtypes:
        for data_format in ("NHWC", "NCHW"):
            name = f"FusedBatchNorm {data_format}"
            for is_gradient, part, most in ((False, "", 1.5), (True, " gradient", 5 / 3)):
                small, large = (
                    _batch_norm(images, data_format, dtype, is_gradient=is_gradient) for images in (SMALL, LARGE)
                )
                found += [
                    Computation(f"{name}{part}, in shared memory", dtype, small, 1.05),
                    Computation(f"{name}{part}, in two passes", dtype, large, most + 0.05, TWO_PASSES),
                ]
        found += [
            Computation("LayerNorm", dtype, _layer_norm(dtype, is_gradient=False), 1.3),
            Computation("LayerNorm gradient", dtype, _layer_norm(dtype, is_gradient=True), 2.0),
            Computation("tanh", dtype, _activation(dtype), 1.01),
            Computation("a gradient is added to sums in float32", dtype, _added(dtype), 1.02),
            Computation("the last gradient is added, and the sums divided", dtype, _ended(dtype), 1.02),
            Computation(f"{NUM_HELD} held gradients are averaged in order", dtype, _ordered(dtype), 1.02),
        ]
    return found
