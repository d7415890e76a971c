"""CudnnRNN and CudnnRNNBackprop on a real GPU, by the real cuDNN."""

import dataclasses
import itertools
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import pytest
from numpy.typing import NDArray

from gradserve_server.devices.cuda.cudnn import Cudnn, load_cudnn
from gradserve_server.devices.cuda.device import CudaDevice
from gradserve_server.errors import InvalidArgumentError
from gradserve_server.ops.cudnn_rnn.cuda.family import CudaCudnnRnn, CudnnCall
from gradserve_server.ops.cudnn_rnn.cuda.network import CudnnThread
from gradserve_server.ops.cudnn_rnn.declaration import make_network, plan_forward
from gradserve_server.ops.cudnn_rnn.reserve import ReserveKey
from gradserve_server.ops.cudnn_rnn.spec import BackpropInputs, ForwardAttributes, ForwardInputs, ForwardOutputs
from tests.golden.cudnn_rnn import OPAQUE, Case, load_cases, relative_error
from tests.ops.cudnn_rnn.reference import OutputGradients, cudnn_rnn, cudnn_rnn_backprop

pytestmark = pytest.mark.cuda

Values = TypeVar("Values", ForwardInputs, OutputGradients)

TOLERANCE = {"float64": 1e-10, "float32": 1e-4, "float16": 1e-2, "bfloat16": 2.0**-6}
"""Relative to the largest element of an output. cuDNN keeps the gates of float16 in float16."""
MODES = ("rnn_relu", "rnn_tanh", "lstm", "gru")
DIRECTIONS = ("unidirectional", "bidirectional")
STEPS, BATCH, INPUT, UNITS, PROJECTION = 13, 9, 40, 48, 20
LENGTHS = [13, 1, 7, 13, 2, 12, 5, 9, 3]
NUM_THREADS = 6

Call = dict[str, NDArray[Any]]


class PoisonedDevice(CudaDevice):
    """New memory holds NaN: what nobody writes to is seen."""

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        array = super().empty(shape, dtype)
        if array.nbytes:
            with self.computing():
                array.data.memset_async(0xFF, array.nbytes)
        return array


@pytest.fixture(scope="module")
def device() -> CudaDevice:
    return PoisonedDevice(0)


@pytest.fixture(scope="module")
def op(device: CudaDevice) -> CudaCudnnRnn:
    made = CudaCudnnRnn(device, ReserveKey())
    made.prepare(lambda: False)
    return made


def put(device: CudaDevice, values: Any) -> Any:
    """Returns a dataclass of inputs with its arrays on the device."""
    arrays = {name: None if array is None else device.from_host(array) for name, array in vars(values).items()}
    return type(values)(**arrays)


def get(device: CudaDevice, values: Any) -> dict[str, NDArray[Any]]:
    return {name: device.to_host(array) for name, array in vars(values).items()}


def run(
    device: CudaDevice,
    op: CudaCudnnRnn,
    inputs: ForwardInputs,
    gradients: OutputGradients,
    attributes: ForwardAttributes,
) -> Call:
    """Runs both ops; reserve_space and host_reserved go through the host. Returns all outputs but those."""
    problem = plan_forward(inputs, attributes).problem
    there = put(device, inputs)
    with device.computing():
        forward = op.forward(there, problem)
    outputs = put(device, ForwardOutputs(**get(device, forward)))
    backprop_inputs = BackpropInputs(**vars(there), **vars(outputs), **vars(put(device, gradients)))
    with device.computing():
        backprop = op.backprop(backprop_inputs, problem)
    everything = get(device, forward) | get(device, backprop)
    return {name: array for name, array in everything.items() if name not in OPAQUE}


def make_call(
    attributes: ForwardAttributes, layers: int, lengths: list[int] | None, dtype: Any, skips: bool = False
) -> tuple[ForwardInputs, OutputGradients]:
    random = np.random.default_rng(3)
    directions = 2 if attributes.direction == "bidirectional" else 1
    input_size = UNITS if skips else INPUT
    network = make_network(attributes, num_layers=layers, input_size=input_size, num_units=UNITS)

    def draw(*shape: int) -> NDArray[Any]:
        array = random.uniform(-1, 1, shape)
        return (array if attributes.time_major or len(shape) < 3 else array.swapaxes(0, 1).copy()).astype(dtype)

    hidden, cell = (layers * directions, BATCH, network.hidden_size), (layers * directions, BATCH, UNITS)
    inputs = ForwardInputs(
        input=draw(STEPS, BATCH, input_size),
        input_h=draw(*hidden),
        params=(0.3 * random.uniform(-1, 1, network.num_params)).astype(dtype),
        input_c=draw(*cell) if attributes.rnn_mode == "lstm" else None,
        sequence_lengths=None if lengths is None else np.array(lengths, np.int32),
    )
    cells = draw(*cell) if attributes.rnn_mode == "lstm" else None
    return inputs, OutputGradients(draw(STEPS, BATCH, directions * network.hidden_size), draw(*hidden), cells)


def _in_float64(values: Values) -> Values:
    arrays = {
        name: array.astype(np.float64) if array is not None and array.dtype != np.int32 else array
        for name, array in vars(values).items()
    }
    return dataclasses.replace(values, **arrays)


def expected(inputs: ForwardInputs, gradients: OutputGradients, attributes: ForwardAttributes) -> Call:
    """What the reference gives in float64."""
    wide = _in_float64(inputs)
    problem = plan_forward(wide, attributes).problem
    trace = cudnn_rnn(np, wide, problem)
    backprop = cudnn_rnn_backprop(np, wide, _in_float64(gradients), trace, problem)
    return {"output": trace.output, "output_h": trace.output_h, "output_c": trace.output_c, **vars(backprop)}


def assert_near(actual: Call, wanted: Call, tolerance: float) -> None:
    assert list(actual) == list(wanted)
    for name, array in wanted.items():
        assert actual[name].shape == array.shape, name
        error = np.abs(actual[name].astype(np.float64) - array).max() / (np.abs(array).max() or 1)
        assert error <= tolerance, f"{name} is off by {error:.3g} of the largest element"


@pytest.mark.parametrize("case", load_cases(), ids=str)
def test_golden(device: CudaDevice, op: CudaCudnnRnn, case: Case) -> None:
    outputs = run(device, op, case.inputs, case.gradients, case.attributes)
    assert list(outputs) == list(case.expected)
    for name, array in outputs.items():
        assert (array.dtype, array.shape) == (case.inputs.input.dtype, case.expected[name].shape), name
        assert relative_error(case, name, array) <= TOLERANCE[case.dtype], name


@pytest.mark.parametrize("time_major", [True, False], ids=["time_major", "batch_major"])
@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["full", "lengths"])
@pytest.mark.parametrize("skips", [False, True], ids=["linear", "skip"])
@pytest.mark.parametrize("num_proj", [0, PROJECTION], ids=["", "projection"])
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("mode", MODES)
def test_reference(
    device: CudaDevice,
    op: CudaCudnnRnn,
    mode: str,
    direction: str,
    layers: int,
    num_proj: int,
    skips: bool,
    lengths: list[int] | None,
    time_major: bool,
) -> None:
    if num_proj and mode != "lstm":
        num_proj = 0  # is ignored
    attributes = ForwardAttributes(
        rnn_mode=mode,
        direction=direction,
        num_proj=num_proj,
        input_mode="skip_input" if skips else "linear_input",
        time_major=time_major,
    )
    inputs, gradients = make_call(attributes, layers, lengths, np.float32, skips)
    outputs = run(device, op, inputs, gradients, attributes)
    assert_near(outputs, expected(inputs, gradients, attributes), TOLERANCE["float32"])


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("mode", MODES)
def test_what_lies_beyond_the_end_of_a_sequence_is_not_read(
    device: CudaDevice, op: CudaCudnnRnn, mode: str, direction: str
) -> None:
    attributes = ForwardAttributes(rnn_mode=mode, direction=direction)
    inputs, gradients = make_call(attributes, 2, LENGTHS, np.float32)
    clean = expected(inputs, gradients, attributes)
    beyond = np.arange(STEPS)[:, None] >= np.array(LENGTHS)
    for array in (inputs.input, gradients.output_backprop):
        array[beyond] = np.nan
    outputs = run(device, op, inputs, gradients, attributes)
    assert_near(outputs, clean, TOLERANCE["float32"])
    assert not outputs["output"][beyond].any()
    assert not outputs["input_backprop"][beyond].any()


@pytest.mark.parametrize("time_major", [True, False], ids=["time_major", "batch_major"])
def test_what_cudnn_writes_beyond_the_end_of_a_sequence(
    device: CudaDevice, op: CudaCudnnRnn, time_major: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Zeros are put there before, and must stay."""
    attributes = ForwardAttributes(time_major=time_major)
    inputs, gradients = make_call(attributes, 2, LENGTHS, np.float32)
    problem = plan_forward(inputs, attributes).problem
    there = put(device, inputs)
    cudnn = load_cudnn()
    with device.computing():
        thread = CudnnThread(device, cudnn)
        network = thread.network(problem)
        network.set_lengths(np.array(LENGTHS, np.int32))
        full = np.full(len(LENGTHS), STEPS, np.int32)  # so that nobody puts zeros
        call = CudnnCall(device, thread, network, problem, full, ReserveKey())
        forward = call.forward(there)
        backprop = call.backprop(BackpropInputs(**vars(there), **vars(forward), **vars(put(device, gradients))))
    beyond = np.arange(STEPS)[:, None] >= np.array(LENGTHS)
    beyond = beyond if time_major else beyond.T
    found = {
        name: np.unique(device.to_host(array)[beyond])
        for name, array in (("output", forward.output), ("input_backprop", backprop.input_backprop))
    }
    with capsys.disabled():
        sys.stdout.write(f"\ncuDNN {cudnn.version}, time_major {time_major}: beyond the end are {found}\n")
    assert found["output"].tolist() == [0]
    assert all(np.isnan(value) or value == 0 for value in found["input_backprop"])


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("skips", [False, True], ids=["linear", "skip"])
@pytest.mark.parametrize("num_proj", [0, PROJECTION], ids=["", "projection"])
def test_where_parameters_are(
    device: CudaDevice, direction: str, skips: bool, num_proj: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing depends on it, but a vector that is a weight space need not be copied."""
    cudnn = load_cudnn()
    for mode, dtype, layers in itertools.product(MODES, (np.float16, np.float32, np.float64), (1, 3)):
        attributes = ForwardAttributes(
            rnn_mode=mode,
            direction=direction,
            num_proj=num_proj if mode == "lstm" else 0,
            input_mode="skip_input" if skips else "linear_input",
        )
        inputs, _ = make_call(attributes, layers, None, dtype, skips)
        problem = plan_forward(inputs, attributes).problem
        with device.computing():
            layout = CudnnThread(device, cudnn).network(problem).params
        if not layout.is_vector:
            with capsys.disabled():
                sys.stdout.write(f"\ncuDNN {cudnn.version}: {problem.network} has its own order: {layout}\n")
        assert sum(run.size for run in layout.runs) == problem.network.num_params
        assert layout.is_vector


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("mode", MODES)
def test_dropout_follows_the_seed(device: CudaDevice, op: CudaCudnnRnn, mode: str, direction: str) -> None:
    attributes = ForwardAttributes(rnn_mode=mode, direction=direction, dropout=0.5, seed=1, seed2=2)
    inputs, _ = make_call(attributes, 2, None, np.float32)

    def output(**changes: Any) -> bytes:
        changed = dataclasses.replace(attributes, **changes)
        with device.computing():
            outputs = op.forward(put(device, inputs), plan_forward(inputs, changed).problem)
        return device.to_host(outputs.output).tobytes()

    assert output() == output() != output(seed=3)
    assert output(is_training=False) == output(is_training=False, seed=3) != output()


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("mode", ["rnn_tanh", "lstm", "gru"])
def test_the_gradient_is_that_of_what_was_dropped(
    device: CudaDevice, op: CudaCudnnRnn, mode: str, direction: str
) -> None:
    """Beside differences, in float64: the mask comes from the reserve space, whatever was drawn in between."""
    attributes = ForwardAttributes(rnn_mode=mode, direction=direction, dropout=0.5, seed=11)
    inputs, gradients = make_call(attributes, 3, LENGTHS, np.float64)
    problem = plan_forward(inputs, attributes).problem
    random = np.random.default_rng(4)
    names = {"input": "input_backprop", "input_h": "input_h_backprop", "params": "params_backprop"}
    moves = {name: random.uniform(-1, 1, getattr(inputs, name).shape) for name in names}
    beyond = np.arange(STEPS)[:, None] >= np.array(LENGTHS)
    gradients.output_backprop[beyond] = 0

    def forward(step: float) -> ForwardOutputs:
        moved = {name: getattr(inputs, name) + step * move for name, move in moves.items()}
        with device.computing():
            return op.forward(put(device, dataclasses.replace(inputs, **moved)), problem)

    def loss(step: float) -> float:
        outputs = get(device, forward(step))
        pairs = [(outputs["output"], gradients.output_backprop), (outputs["output_h"], gradients.output_h_backprop)]
        if gradients.output_c_backprop is not None:
            pairs.append((outputs["output_c"], gradients.output_c_backprop))
        return float(sum((ours * theirs).sum() for ours, theirs in pairs))

    outputs = forward(0)
    step = 1e-6
    difference = (loss(step) - loss(-step)) / (2 * step)
    with device.computing():
        there = put(device, inputs)
        backprop = op.backprop(BackpropInputs(**vars(there), **vars(outputs), **vars(put(device, gradients))), problem)
    slopes = get(device, backprop)
    slope = float(sum((slopes[gradient] * moves[name]).sum() for name, gradient in names.items()))
    assert slope == pytest.approx(difference, rel=1e-5)


@pytest.mark.parametrize("place", [0, 100, 200, 256, -1], ids=["header", "tag", "ours", "cudnns", "last"])
def test_a_reserve_space_that_was_changed(device: CudaDevice, op: CudaCudnnRnn, place: int) -> None:
    attributes = ForwardAttributes()
    inputs, gradients = make_call(attributes, 2, LENGTHS, np.float32)
    problem = plan_forward(inputs, attributes).problem
    there = put(device, inputs)
    with device.computing():
        outputs = get(device, op.forward(there, problem))
    space = outputs["reserve_space"].view(np.uint8)
    for changed in (False, True):
        space[place] ^= changed
        outputs["host_reserved"][...] = space[: len(outputs["host_reserved"])].view(np.int8)
        given = put(device, ForwardOutputs(**outputs))
        call = BackpropInputs(**vars(there), **vars(given), **vars(put(device, gradients)))
        with device.computing():
            if changed:
                with pytest.raises(InvalidArgumentError) as raised:
                    op.backprop(call, problem)
                assert raised.value.field == "reserve_space"
            else:
                op.backprop(call, problem)


def test_threads_at_once(device: CudaDevice, op: CudaCudnnRnn) -> None:
    """Each has its own handle, descriptors and stream."""
    calls = []
    for mode, direction in itertools.product(MODES, DIRECTIONS):
        attributes = ForwardAttributes(rnn_mode=mode, direction=direction)
        inputs, gradients = make_call(attributes, 2, LENGTHS, np.float32)
        calls.append((inputs, gradients, attributes, expected(inputs, gradients, attributes)))
    start = threading.Barrier(NUM_THREADS)

    def work(first: int) -> None:
        start.wait()
        for index in range(2 * len(calls)):
            inputs, gradients, attributes, wanted = calls[(first + index) % len(calls)]
            assert_near(run(device, op, inputs, gradients, attributes), wanted, TOLERANCE["float32"])

    with ThreadPoolExecutor(NUM_THREADS) as threads:
        list(threads.map(work, range(NUM_THREADS)))


def test_it_is_cudnn_9() -> None:
    found: Cudnn = load_cudnn()
    assert found.version // 10000 == 9
