"""`python -m benchmarks.gpu.batch_norm --json PATH`: batch normalization on a GPU, beside cuDNN's.

Needs a GPU, CuPy, and a torch built for CUDA, in one environment with gradserve. Covers all sizes of a ResNet-50's
layers and both memory formats; cuDNN is called through torch. Implementations take turns, in alternating order.

A call's time is the GPU's alone: the stream is kept busy with copies while calls are queued behind them, and events
before the first call and after the last one measure how long they took. Each call has its own inputs and outputs, so
many that they come from memory and not from the cache. Bandwidth counts what two passes move: the gradient reads x and
dy twice and writes dx, the forward pass reads x twice and writes y. A kernel that needs one pass may be above 100 %.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from benchmarks.gpu import __main__ as gpu
from gradserve_server.devices.cuda.device import CudaDevice
from gradserve_server.ops.batch_norm.cuda import CudaBatchNorm
from gradserve_server.ops.batch_norm.spec import (
    ForwardAttributes,
    ForwardInputs,
    GradAttributes,
    GradInputs,
    plan_forward,
    plan_gradient,
)

SHAPES = ((32, 56, 56, 64), (32, 14, 14, 256), (8, 112, 112, 64), (32, 28, 28, 128))
"""The batch, height, width and channels of each shape."""
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
FORMATS = {"channels_last": "NHWC", "contiguous": "NCHW"}
"""Torch's names of memory formats, and TensorFlow's."""
PASSES = {"gradient": 5, "forward": 3}
"""The number of times that each operation moves a tensor."""

TARGET_BANDWIDTH = 0.8
TARGET_SPEED = 1.0
EPSILON = 1e-3
TOLERANCE = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}
"""The most by which two right results may differ, relative to the largest element."""

_CACHE_BYTES = 1 << 28
"""Four times the largest cache of a GPU."""


class Contestant(Protocol):
    """One implementation on one set of inputs."""

    def forward(self, index: int) -> Any:
        """Queues FusedBatchNorm; returns y."""
        ...

    def gradient(self, index: int) -> Any:
        """Queues FusedBatchNormGrad; returns x_backprop."""
        ...

    def to_host(self, array: Any) -> NDArray[np.float32]:
        """Returns an output in our layout, in host memory."""
        ...


@dataclass(frozen=True)
class Result:
    """One line of the table.

    Attributes:
        operation: "gradient" or "forward".
        shape: One of SHAPES.
        data_format: One of FORMATS.
        dtype: One of DTYPES.
        microseconds: The median time of our kernels.
        cudnn_microseconds: The median time of cuDNN's; None if it refused.
        host_microseconds: The median processor time for queueing one of our calls.
        bandwidth_fraction: The bandwidth of our kernels as a fraction of a copy's.
        cudnn_error: The reason why cuDNN refused.
    """

    operation: str
    shape: tuple[int, ...]
    data_format: str
    dtype: str
    microseconds: float
    cudnn_microseconds: float | None
    host_microseconds: float
    bandwidth_fraction: float
    cudnn_error: str | None

    @property
    def speed(self) -> float | None:
        """Our speed divided by cuDNN's."""
        return None if self.cudnn_microseconds is None else self.cudnn_microseconds / self.microseconds


def main() -> None:
    """Measures and prints a table; a missed target is reported, not an error."""
    arguments = _parse()
    cupy, torch = gpu.libraries()
    device = CudaDevice(0)
    with device.computing():
        stopwatch = gpu.Stopwatch(cupy)
        copy_bandwidth = stopwatch.copy_bandwidth()
        facts = {**gpu.facts(cupy, torch), "copy_gb_per_second": round(copy_bandwidth / 1e9, 1)}
        gpu.print_facts(facts)
        results = []
        for shape, dtype, data_format in itertools.product(SHAPES, DTYPES, FORMATS):
            for result in _compare(device, torch, stopwatch, shape, dtype, data_format, arguments, copy_bandwidth):
                print(line_of(result), flush=True)
                results.append(result)
    print(verdicts_of(results))
    if arguments.json:
        gpu.write_json(arguments.json, facts, [{**asdict(result), "speed": result.speed} for result in results])


class Ours:
    """Our kernels."""

    def __init__(
        self, device: CudaDevice, x: NDArray[Any], dy: NDArray[Any], data_format: str, num_inputs: int
    ) -> None:
        self._device = device
        self._batch_norm = CudaBatchNorm(device)
        channels = x.shape[-1 if data_format == "NHWC" else 1]
        scale, offset = (device.from_host(np.full(channels, value, np.float32)) for value in (1.5, 0.5))
        nothing = device.from_host(np.empty(0, np.float32))
        xs = [device.from_host(x) for _ in range(num_inputs)]
        self._forward_attributes = ForwardAttributes(epsilon=EPSILON, data_format=data_format)
        self._grad_attributes = GradAttributes(epsilon=EPSILON, data_format=data_format)
        self._forward_inputs = [ForwardInputs(each, scale, offset, nothing, nothing) for each in xs]
        self._geometry = plan_forward(self._forward_inputs[0], self._forward_attributes).geometry
        outputs = self._batch_norm.forward(self._forward_inputs[0], self._forward_attributes, self._geometry)
        mean, variance = outputs.reserve_space_1, outputs.reserve_space_2
        self._grad_inputs = [GradInputs(device.from_host(dy), each, scale, mean, variance) for each in xs]
        plan_gradient(self._grad_inputs[0], self._grad_attributes)

    def forward(self, index: int) -> Any:
        inputs = self._forward_inputs[index % len(self._forward_inputs)]
        return self._batch_norm.forward(inputs, self._forward_attributes, self._geometry).y

    def gradient(self, index: int) -> Any:
        inputs = self._grad_inputs[index % len(self._grad_inputs)]
        return self._batch_norm.gradient(inputs, self._grad_attributes, self._geometry).x_backprop

    def to_host(self, array: Any) -> NDArray[np.float32]:
        return self._device.to_host(array).astype(np.float32)


class Cudnn:
    """cuDNN's kernels, called as torch does."""

    def __init__(self, torch: Any, x: NDArray[Any], dy: NDArray[Any], data_format: str, num_inputs: int) -> None:
        self._torch = torch
        self._is_channels_last = data_format == "NHWC"
        channels = x.shape[-1 if self._is_channels_last else 1]
        self._xs = [self._from_host(x) for _ in range(num_inputs)]
        self._dys = [self._from_host(dy) for _ in range(num_inputs)]
        self._scale, self._offset = (torch.full((channels,), value, device="cuda") for value in (1.5, 0.5))
        _, self._mean, self._inverse_deviation, self._reserve = self._normalize(0)

    def forward(self, index: int) -> Any:
        return self._normalize(index)[0]

    def gradient(self, index: int) -> Any:
        index %= len(self._xs)
        return self._torch.ops.aten.cudnn_batch_norm_backward(
            self._xs[index],
            self._dys[index],
            self._scale,
            None,
            None,
            self._mean,
            self._inverse_deviation,
            EPSILON,
            self._reserve,
        )[0]

    def to_host(self, array: Any) -> NDArray[np.float32]:
        ours = array.permute(0, 2, 3, 1) if self._is_channels_last else array
        host: NDArray[np.float32] = ours.float().cpu().numpy()
        return host

    def _normalize(self, index: int) -> Any:
        x = self._xs[index % len(self._xs)]
        return self._torch.ops.aten.cudnn_batch_norm(x, self._scale, self._offset, None, None, True, 0.1, EPSILON)

    def _from_host(self, array: NDArray[Any]) -> Any:
        """Converts an array; torch treats channels last as a permutation of memory, not as a shape."""
        tensor = gpu.torch_from_host(self._torch, array)
        return tensor.permute(0, 3, 1, 2) if self._is_channels_last else tensor


def _compare(
    device: CudaDevice,
    torch: Any,
    stopwatch: gpu.Stopwatch,
    shape: tuple[int, ...],
    dtype: str,
    data_format: str,
    arguments: argparse.Namespace,
    copy_bandwidth: float,
) -> Iterator[Result]:
    random = np.random.default_rng(0)
    own_format = FORMATS[data_format]
    own_shape = shape if own_format == "NHWC" else (shape[0], shape[3], shape[1], shape[2])
    x, dy = (random.standard_normal(own_shape, np.float32).astype(DTYPES[dtype]) for _ in range(2))
    num_inputs = max(2, -(-_CACHE_BYTES // x.nbytes))
    contestants: dict[str, Contestant] = {"ours": Ours(device, x, dy, own_format, num_inputs)}
    error = None
    with torch.no_grad(), gpu.torch_on_stream(torch, stopwatch.stream):
        try:
            cudnn = Cudnn(torch, x, dy, own_format, num_inputs)
            cudnn.gradient(0)
        except RuntimeError as refusal:
            error = str(refusal).splitlines()[0]
        else:
            contestants["cudnn"] = cudnn
            _check(contestants, TOLERANCE[dtype])
        for operation, passes in PASSES.items():
            on_gpu: dict[str, list[float]] = {name: [] for name in contestants}
            on_host: dict[str, list[float]] = {name: [] for name in contestants}
            for repeat in range(-1, arguments.repeats):
                for name in sorted(contestants, reverse=repeat % 2 == 1):
                    seconds, queueing = stopwatch.time(getattr(contestants[name], operation), arguments.calls)
                    if repeat >= 0:  # the first one warms up
                        on_gpu[name].append(seconds)
                        on_host[name].append(queueing)
            seconds = statistics.median(on_gpu["ours"])
            yield Result(
                operation=operation,
                shape=shape,
                data_format=data_format,
                dtype=dtype,
                microseconds=1e6 * seconds,
                cudnn_microseconds=1e6 * statistics.median(on_gpu["cudnn"]) if "cudnn" in on_gpu else None,
                host_microseconds=1e6 * statistics.median(on_host["ours"]),
                bandwidth_fraction=passes * x.nbytes / seconds / copy_bandwidth,
                cudnn_error=error,
            )


def _check(contestants: dict[str, Contestant], tolerance: float) -> None:
    """Ends the program if the two disagree, because then their times mean nothing."""
    for operation in PASSES:
        ours, theirs = (contestant.to_host(getattr(contestant, operation)(0)) for contestant in contestants.values())
        difference = float(np.abs(ours - theirs).max() / np.abs(theirs).max())
        if not difference <= tolerance:
            sys.exit(f"{operation}: our result and cuDNN's differ by {difference:.2g} of the largest element")


def line_of(result: Result) -> str:
    """Returns the line that is printed for a result."""
    shape = "x".join(map(str, result.shape))
    what = f"{result.operation:8} {shape:13} {result.dtype:8} {result.data_format:13}"
    beside = f"cuDNN refuses: {result.cudnn_error}"
    if result.cudnn_microseconds is not None:
        beside = f"cuDNN {result.cudnn_microseconds:7.1f} us, {result.speed:5.2f}x as fast"
    return (
        f"{what} {result.microseconds:7.1f} us, {result.bandwidth_fraction:4.0%} of a copy's bandwidth; {beside}; "
        f"host {result.host_microseconds:.0f} us"
    )


def verdicts_of(results: list[Result]) -> str:
    """Returns the targets, and whether each was reached."""
    lines = ["Targets"]
    for result in results:
        what = f"{result.operation} {list(result.shape)} {result.dtype} {result.data_format}"
        targets = [("of a copy's bandwidth", result.bandwidth_fraction, TARGET_BANDWIDTH)]
        if result.speed is not None:
            targets.append(("of cuDNN's speed", result.speed, TARGET_SPEED))
        for of_what, reached, target in targets:
            verdict = "reached" if reached >= target else "MISSED"
            lines.append(f"  {verdict}: {what}: {reached:.0%} {of_what}, target {target:.0%}")
    return "\n".join(lines)


def _parse() -> argparse.Namespace:
    parser = gpu.parser("benchmarks.gpu.batch_norm", __doc__)
    parser.add_argument("--calls", type=int, default=20, help="calls that are timed together (default: 20)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
