"""`python -m benchmarks.gpu.rnn --json PATH`: CudnnRNN on a GPU, beside the same networks in torch.

Needs a GPU, CuPy, cuDNN, and a torch built for CUDA, in one environment with gradserve. Both sides call cuDNN, so this
compares everything around it. Networks, inputs and dtypes are the same, and so is the arithmetic: float32 is not
rounded to TensorFloat-32. Implementations take turns, in alternating order.

A call finds an idle GPU. Events before and after it measure how long it took, including queueing of its kernels that
takes longer than they do. A training step is a forward and a backward call. torch lets its backward call overwrite the
data of the forward call; CudnnRNNBackprop copies that first, because it may be needed again.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from benchmarks.gpu import __main__ as gpu
from gradserve_server.devices.cuda.device import CudaDevice
from gradserve_server.ops.cudnn_rnn.cuda.family import CudaCudnnRnn
from gradserve_server.ops.cudnn_rnn.reserve import ReserveKey
from gradserve_server.ops.cudnn_rnn.spec import BackpropInputs, ForwardInputs, Mode, Network, Problem, split_params

DTYPES = ("float32", "float16")
"""The dtypes; not bfloat16, which CudnnRNN computes in float32, and torch does not."""
OPERATIONS = ("forward", "step")
TARGET_RATIO = 1.05
TOLERANCE = {"float32": 1e-4, "float16": 2e-2}
"""The most by which two right results may differ, relative to the largest element."""


@dataclass(frozen=True)
class Size:
    """A network, and the sequences to which it is applied; the input has the size of the state."""

    mode: Mode
    num_layers: int
    num_directions: int
    max_seq_length: int
    batch: int
    num_units: int

    def __str__(self) -> str:
        shape = f"{self.max_seq_length}x{self.batch}x{self.num_units}"
        return f"{self.mode.value} {self.num_layers}x{self.num_directions} {shape}"

    def problem(self, dtype: str) -> Problem:
        """Returns the problem, for training."""
        network = Network(self.mode, self.num_layers, self.num_directions, self.num_units, self.num_units)
        return Problem(
            network=network,
            dtype=np.dtype(dtype),
            max_seq_length=self.max_seq_length,
            batch=self.batch,
            time_major=True,
            dropout=0.0,
            seed=0,
            is_training=True,
        )


SIZES = (
    Size(Mode.LSTM, 1, 1, 50, 64, 128),
    Size(Mode.LSTM, 2, 1, 100, 64, 512),
    Size(Mode.LSTM, 1, 2, 100, 32, 256),
    Size(Mode.LSTM, 4, 1, 50, 128, 1024),
    Size(Mode.GRU, 2, 1, 100, 64, 512),
    Size(Mode.GRU, 1, 2, 100, 32, 256),
    Size(Mode.TANH, 2, 1, 100, 64, 512),
)


class Contestant(Protocol):
    """One implementation of one network."""

    def forward(self) -> Any:
        """Queues the forward pass in training; returns its results, `output` first."""
        ...

    def step(self) -> Any:
        """Queues the forward and the backward pass; returns the gradients, the input's first."""
        ...

    def to_host(self, array: Any) -> NDArray[np.float32]:
        """Returns an output in host memory."""
        ...


@dataclass(frozen=True)
class Result:
    """One line of the table.

    Attributes:
        operation: One of OPERATIONS.
        network: One of SIZES.
        dtype: One of DTYPES.
        microseconds: The median time of CudnnRNN.
        torch_microseconds: The median time of torch.
    """

    operation: str
    network: str
    dtype: str
    microseconds: float
    torch_microseconds: float

    @property
    def ratio(self) -> float:
        """Our time divided by torch's."""
        return self.microseconds / self.torch_microseconds


@dataclass(frozen=True)
class Tensors:
    """The data for both sides: inputs, parameters, and the gradients of output and last states."""

    input: NDArray[Any]
    input_h: NDArray[Any]
    input_c: NDArray[Any]
    params: NDArray[Any]
    output_backprop: NDArray[Any]
    output_h_backprop: NDArray[Any]
    output_c_backprop: NDArray[Any]


def main() -> None:
    """Measures and prints a table; a missed target is reported, not an error."""
    arguments = gpu.parser("benchmarks.gpu.rnn", __doc__).parse_args()
    cupy, torch = gpu.libraries()
    torch.backends.cudnn.allow_tf32 = False
    device = CudaDevice(0)
    op = CudaCudnnRnn(device, ReserveKey())
    with device.computing():
        stopwatch = gpu.Stopwatch(cupy)
        facts = gpu.facts(cupy, torch)
        gpu.print_facts(facts)
        results = []
        with gpu.torch_on_stream(torch, stopwatch.stream):
            for size, dtype in itertools.product(SIZES, DTYPES):
                for result in _compare(device, op, torch, stopwatch, size, dtype, arguments):
                    print(line_of(result), flush=True)
                    results.append(result)
    print(verdicts_of(results))
    if arguments.json:
        gpu.write_json(arguments.json, facts, [{**asdict(result), "ratio": result.ratio} for result in results])


class Ours:
    """CudnnRNN and CudnnRNNBackprop."""

    def __init__(self, device: CudaDevice, op: CudaCudnnRnn, problem: Problem, tensors: Tensors) -> None:
        self._device = device
        self._op = op
        self._problem = problem
        given = {name: device.from_host(array) for name, array in vars(tensors).items()}
        self._gradients = {name: array for name, array in given.items() if name.endswith("_backprop")}
        self._inputs = ForwardInputs(given["input"], given["input_h"], given["params"], given["input_c"])

    def forward(self) -> Any:
        outputs = self._op.forward(self._inputs, self._problem)
        return outputs.output, outputs

    def step(self) -> Any:
        outputs = self._op.forward(self._inputs, self._problem)
        inputs = BackpropInputs(**vars(self._inputs), **vars(outputs), **self._gradients)
        gradients = self._op.backprop(inputs, self._problem)
        return gradients.input_backprop, gradients

    def to_host(self, array: Any) -> NDArray[np.float32]:
        return self._device.to_host(array).astype(np.float32)


class Torch:
    """The same network as a torch module."""

    def __init__(self, torch: Any, problem: Problem, tensors: Tensors) -> None:
        self._torch = torch
        network = problem.network
        is_lstm = network.mode is Mode.LSTM
        kind = {Mode.LSTM: torch.nn.LSTM, Mode.GRU: torch.nn.GRU}.get(network.mode, torch.nn.RNN)
        options = {} if kind is not torch.nn.RNN else {"nonlinearity": network.mode.value.removeprefix("rnn_")}
        self._module = kind(
            network.input_size,
            network.num_units,
            network.num_layers,
            bidirectional=network.num_directions == 2,
            device="cuda",
            dtype=getattr(torch, problem.dtype.name),
            **options,
        )
        given = {name: gpu.torch_from_host(torch, array) for name, array in vars(tensors).items()}
        self._set_params(network, given["params"])
        self._input = given["input"].requires_grad_()
        states = [given["input_h"].requires_grad_(), given["input_c"].requires_grad_()]
        self._states = states if is_lstm else states[:1]
        gradients = [given[f"{name}_backprop"] for name in ("output", "output_h", "output_c")]
        self._gradients = gradients if is_lstm else gradients[:2]
        self._wanted = [self._input, *self._states, *self._module.parameters()]

    def forward(self) -> Any:
        states = tuple(self._states) if len(self._states) == 2 else self._states[0]
        output, last = self._module(self._input, states)
        return output, *(last if isinstance(last, tuple) else (last,))

    def step(self) -> Any:
        return self._torch.autograd.grad(self.forward(), self._wanted, self._gradients)

    def to_host(self, array: Any) -> NDArray[np.float32]:
        host: NDArray[np.float32] = array.detach().float().cpu().numpy()
        return host

    def _set_params(self, network: Network, params: Any) -> None:
        """Sets the module's parameters, which it has by layer and direction, with kinds in torch's order."""
        module_params = iter(self._module.parameters())
        with self._torch.no_grad():
            for ours in split_params(network, params):
                for part in (ours.input_weights, ours.recurrent_weights, ours.input_bias, ours.recurrent_bias):
                    next(module_params).copy_(part)
        self._module.flatten_parameters()


def _compare(
    device: CudaDevice,
    op: CudaCudnnRnn,
    torch: Any,
    stopwatch: gpu.Stopwatch,
    size: Size,
    dtype: str,
    arguments: argparse.Namespace,
) -> Iterator[Result]:
    problem = size.problem(dtype)
    tensors = tensors_of(problem)
    contestants: dict[str, Contestant] = {
        "ours": Ours(device, op, problem, tensors),
        "torch": Torch(torch, problem, tensors),
    }
    _check(contestants, TOLERANCE[dtype])
    for operation in OPERATIONS:
        seconds: dict[str, list[float]] = {name: [] for name in contestants}
        for repeat in range(-2, arguments.repeats):
            for name in sorted(contestants, reverse=repeat % 2 == 1):
                taken = stopwatch.time_alone(getattr(contestants[name], operation))
                if repeat >= 0:  # the first ones warm up
                    seconds[name].append(taken)
        medians = {name: 1e6 * statistics.median(taken) for name, taken in seconds.items()}
        yield Result(operation, str(size), dtype, medians["ours"], medians["torch"])


def tensors_of(problem: Problem) -> Tensors:
    """Returns a problem's inputs, drawn at random from a fixed seed."""
    random = np.random.default_rng(0)
    network = problem.network

    def draw(*shape: int, scale: float = 1.0) -> NDArray[Any]:
        return (scale * random.uniform(-1, 1, shape)).astype(problem.dtype)

    states = problem.state_shape(network.num_units)
    return Tensors(
        input=draw(*problem.sequence_shape(network.input_size)),
        input_h=draw(*states),
        input_c=draw(*states),
        params=draw(network.num_params, scale=network.num_units**-0.5),
        output_backprop=draw(*problem.sequence_shape(network.num_directions * network.num_units)),
        output_h_backprop=draw(*states),
        output_c_backprop=draw(*states),
    )


def _check(contestants: dict[str, Contestant], tolerance: float) -> None:
    """Ends the program if the two disagree, because then their times mean nothing."""
    for operation in OPERATIONS:
        ours, theirs = (contestant.to_host(getattr(contestant, operation)()[0]) for contestant in contestants.values())
        difference = float(np.abs(ours - theirs).max() / np.abs(theirs).max())
        if not difference <= tolerance:
            sys.exit(f"{operation}: our result and torch's differ by {difference:.2g} of the largest element")


def line_of(result: Result) -> str:
    """Returns the line that is printed for a result."""
    return (
        f"{result.operation:7} {result.network:25} {result.dtype:8} {result.microseconds:9.1f} us; "
        f"torch {result.torch_microseconds:9.1f} us; {result.ratio:5.3f} times torch's"
    )


def verdicts_of(results: list[Result]) -> str:
    """Returns the targets, and whether each was reached."""
    lines = ["Targets"]
    for result in results:
        verdict = "reached" if result.ratio <= TARGET_RATIO else "MISSED"
        what = f"{result.operation} {result.network} {result.dtype}"
        lines.append(f"  {verdict}: {what}: {result.ratio:.3f} times torch's time, target {TARGET_RATIO}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
