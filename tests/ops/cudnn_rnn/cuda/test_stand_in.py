"""CudnnRNN and CudnnRNNBackprop by cuDNN, with a stand-in for it: what it is told, and what becomes of its answers."""

import gc
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradserve_server.devices.cuda.cudnn import Cudnn, DataType, MathType, RnnDataLayout, Status
from gradserve_server.errors import InternalError, InvalidArgumentError
from gradserve_server.ops.cudnn_rnn.cpu.family import dropout_masks
from gradserve_server.ops.cudnn_rnn.cuda.family import CudaCudnnRnn
from gradserve_server.ops.cudnn_rnn.cuda.network import KEPT_NETWORKS, KEPT_SEEDS
from gradserve_server.ops.cudnn_rnn.declaration import plan_forward
from gradserve_server.ops.cudnn_rnn.reserve import ReserveKey
from gradserve_server.ops.cudnn_rnn.spec import (
    BackpropInputs,
    BackpropOutputs,
    ForwardAttributes,
    ForwardInputs,
    ForwardOutputs,
    Mode,
    Problem,
)
from tests.devices.cuda.cudnn.fake_cudnn import EXECUTION_FAILED, STATES_BYTES, VERSION, FakeCudnn
from tests.golden.cudnn_rnn import Case, assert_outputs, load_cases
from tests.ops.cudnn_rnn.cuda.host_device import HostDevice
from tests.ops.cudnn_rnn.random_calls import Numbers
from tests.ops.cudnn_rnn.reference import OutputGradients, cudnn_rnn, cudnn_rnn_backprop

CASES = load_cases()
STEPS, BATCH, INPUT, UNITS = 4, 3, 5, 6
LSTM = ForwardAttributes()
DROPOUT = ForwardAttributes(dropout=0.25, seed=5, seed2=7)
DESCRIPTORS = ["DropoutDescriptor", "RNNDataDescriptor", "RNNDataDescriptor", "RNNDescriptor"]
OF_LSTM = ["", *DESCRIPTORS, "TensorDescriptor", "TensorDescriptor"]


class Bench:
    """The op on a stand-in for cuDNN."""

    def __init__(self, folder: Path, **options: bool) -> None:
        self.fake = FakeCudnn(**options)
        self.device = HostDevice(folder)
        self.loads = 0
        self.op = CudaCudnnRnn(self.device, ReserveKey(Numbers()), self.load)

    def load(self) -> Cudnn:
        self.loads += 1
        return Cudnn(self.fake)

    def forward(self, inputs: ForwardInputs, attributes: ForwardAttributes = LSTM) -> ForwardOutputs:
        return self.op.forward(inputs, plan_forward(inputs, attributes).problem)

    def backprop(
        self, inputs: ForwardInputs, outputs: ForwardOutputs, attributes: ForwardAttributes = LSTM, **changes: Any
    ) -> BackpropOutputs:
        problem = plan_forward(inputs, attributes).problem
        return self.op.backprop(backprop_inputs(inputs, outputs, **changes), problem)

    def last_arguments(self, name: str) -> tuple[Any, ...]:
        return next(arguments for called, arguments in reversed(self.fake.calls) if called == name)


@pytest.fixture
def bench(compiled: Path) -> Iterator[Bench]:
    made = Bench(compiled)
    yield made
    assert made.fake.faults == []


def make_inputs(
    *,
    layers: int = 2,
    lengths: list[int] | None = None,
    dtype: Any = np.float32,
    units: int = UNITS,
    batch: int = BATCH,
) -> ForwardInputs:
    """For an lstm of one direction, time first."""
    random = np.random.default_rng(1)
    num_params = sum(4 * units * ((units if layer else INPUT) + units + 2) for layer in range(layers))
    shapes = [(STEPS, batch, INPUT), (layers, batch, units), (num_params,), (layers, batch, units)]
    x, h, params, c = (random.uniform(-1, 1, shape).astype(dtype) for shape in shapes)
    return ForwardInputs(x, h, params, c, sequence_lengths=None if lengths is None else np.array(lengths, np.int32))


def gradients_like(outputs: ForwardOutputs) -> OutputGradients:
    random = np.random.default_rng(2)
    names = ("output", "output_h", "output_c")
    arrays = [getattr(outputs, name) for name in names]
    return OutputGradients(*(random.uniform(-1, 1, each.shape).astype(each.dtype) for each in arrays))


def backprop_inputs(inputs: ForwardInputs, outputs: ForwardOutputs, **changes: Any) -> BackpropInputs:
    return BackpropInputs(**{**vars(inputs), **vars(outputs), **vars(gradients_like(outputs)), **changes})


class TestNumbers:
    @pytest.mark.parametrize("is_shuffled", [False, True], ids=["vector", "shuffled"])
    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_golden(self, compiled: Path, case: Case, is_shuffled: bool) -> None:
        bench = Bench(compiled, is_shuffled=is_shuffled)
        outputs = bench.op.forward(case.inputs, case.problem)
        assert bench.fake.faults == []
        assert_outputs(case, outputs)
        backprop = bench.op.backprop(case.backprop_inputs(outputs), case.problem)
        assert bench.fake.faults == []
        assert_outputs(case, backprop)
        for array in (*vars(outputs).values(), *vars(backprop).values()):
            assert array.flags.c_contiguous

    def test_dropout_is_that_of_the_seed_in_both_directions(self, bench: Bench) -> None:
        inputs = make_inputs(dtype=np.float64)
        problem = plan_forward(inputs, DROPOUT).problem
        masks = dropout_masks(problem)
        trace = cudnn_rnn(np, inputs, problem, masks)
        outputs = bench.forward(inputs, DROPOUT)
        np.testing.assert_allclose(outputs.output, trace.output)
        expected = cudnn_rnn_backprop(np, inputs, gradients_like(outputs), trace, problem, masks)
        backprop = bench.backprop(inputs, outputs, DROPOUT)
        np.testing.assert_allclose(backprop.input_backprop, expected.input_backprop)
        np.testing.assert_allclose(backprop.params_backprop, expected.params_backprop)

    def test_every_forward_call_starts_the_generator_anew(self, bench: Bench) -> None:
        inputs = make_inputs()
        first, again, other = (
            bench.forward(inputs, replace(DROPOUT, seed=seed)).output.tobytes() for seed in (5, 5, 6)
        )
        assert first == again != other
        assert bench.fake.count("cudnnCreateRNNDescriptor") == 1
        assert bench.last_arguments("cudnnSetDropoutDescriptor")[4:] == (STATES_BYTES, 6 << 32 | 7)

    def test_the_generator_is_made_once_for_a_seed(self, bench: Bench) -> None:
        """In a thread, for the latest seeds: its first states are kept, and put back before each call."""
        inputs = make_inputs()

        def masked(seed: int, layers: int = 2) -> bytes:
            given = inputs if layers == 2 else make_inputs(layers=layers)
            result: bytes = bench.forward(given, replace(DROPOUT, seed=seed)).output.tobytes()
            return result

        seeds = range(KEPT_SEEDS + 1)
        fresh = {seed: masked(seed) for seed in seeds}
        assert len(set(fresh.values())) == len(seeds)
        assert bench.fake.count("cudnnSetDropoutDescriptor") == len(seeds)
        for seed in [*seeds[1:], *seeds[1:]]:
            assert masked(seed) == fresh[seed]
            masked(seed, layers=3)
        assert bench.fake.count("cudnnSetDropoutDescriptor") == len(seeds)
        assert masked(0) == fresh[0]
        assert bench.fake.count("cudnnSetDropoutDescriptor") == len(seeds) + 1

    def test_a_generator_that_could_not_be_made_is_not_kept(self, bench: Bench) -> None:
        inputs = make_inputs()
        fresh = [bench.forward(inputs, replace(DROPOUT, seed=seed)).output.tobytes() for seed in range(KEPT_SEEDS)]
        bench.fake.statuses["cudnnSetDropoutDescriptor"] = EXECUTION_FAILED
        with pytest.raises(InternalError, match="cudnnSetDropoutDescriptor"):
            bench.forward(inputs, replace(DROPOUT, seed=99))
        del bench.fake.statuses["cudnnSetDropoutDescriptor"]
        again = [bench.forward(inputs, replace(DROPOUT, seed=seed)).output.tobytes() for seed in range(KEPT_SEEDS)]
        assert again == fresh

    def test_backprop_does_not_start_it(self, bench: Bench) -> None:
        inputs = make_inputs()
        outputs = bench.forward(inputs, DROPOUT)
        count = bench.fake.count("cudnnSetDropoutDescriptor")
        bench.backprop(inputs, outputs, DROPOUT)
        assert bench.fake.count("cudnnSetDropoutDescriptor") == count

    def test_inference_neither_drops_nor_reserves(self, bench: Bench) -> None:
        inputs = make_inputs()
        outputs = bench.forward(inputs, replace(DROPOUT, is_training=False))
        expected = cudnn_rnn(np, inputs, plan_forward(inputs, LSTM).problem)
        np.testing.assert_allclose(outputs.output, expected.output, rtol=1e-6)
        for name, dtype in (("reserve_space", np.float32), ("host_reserved", np.int8)):
            array = getattr(outputs, name)
            assert (array.shape, array.dtype, array.item()) == ((), dtype, 0)

    def test_what_lies_beyond_the_end_of_a_sequence_is_zero_and_not_read(self, bench: Bench) -> None:
        inputs = make_inputs(lengths=[2, 4, 1])
        outputs = bench.forward(inputs)
        backprop = bench.backprop(inputs, outputs)
        beyond = np.arange(STEPS)[:, None] >= np.array([2, 4, 1])
        assert not outputs.output[beyond].any()
        assert not backprop.input_backprop[beyond].any()
        assert np.isfinite(backprop.input_backprop).all()

    def test_backprop_leaves_the_reserve_space_for_another_one(self, bench: Bench) -> None:
        inputs = make_inputs()
        outputs = bench.forward(inputs)
        before = outputs.reserve_space.tobytes()
        first, second = (bench.backprop(inputs, outputs) for _ in range(2))
        assert outputs.reserve_space.tobytes() == before
        for name, array in vars(first).items():
            np.testing.assert_array_equal(array, getattr(second, name))


class TestCalls:
    def test_in_their_order(self, bench: Bench) -> None:
        inputs = make_inputs()
        bench.backprop(inputs, bench.forward(inputs))
        assert bench.fake.names() == [
            *("cudnnSetStream", "cudnnRNNForward"),
            *("cudnnRNNBackwardData_v8", "cudnnRNNBackwardWeights_v8"),
        ]

    @pytest.mark.parametrize(
        ("dtype", "types"),
        [
            ("float32", (DataType.CUDNN_DATA_FLOAT, DataType.CUDNN_DATA_FLOAT, MathType.CUDNN_FMA_MATH)),
            ("float64", (DataType.CUDNN_DATA_DOUBLE, DataType.CUDNN_DATA_DOUBLE, MathType.CUDNN_DEFAULT_MATH)),
            ("float16", (DataType.CUDNN_DATA_HALF, DataType.CUDNN_DATA_FLOAT, MathType.CUDNN_TENSOR_OP_MATH)),
            ("bfloat16", (DataType.CUDNN_DATA_FLOAT, DataType.CUDNN_DATA_FLOAT, MathType.CUDNN_FMA_MATH)),
        ],
    )
    def test_types(self, bench: Bench, dtype: str, types: tuple[int, ...]) -> None:
        outputs = bench.forward(make_inputs(dtype=np.dtype(dtype)))
        assert bench.last_arguments("cudnnSetRNNDescriptor_v8")[6:9] == types
        assert {array.dtype.name for array in vars(outputs).values()} == {dtype, "int8"}

    @pytest.mark.parametrize("is_time_major", [True, False])
    def test_sequences_stay_where_they_are(self, bench: Bench, is_time_major: bool) -> None:
        inputs = make_inputs()
        if not is_time_major:
            first = {
                name: np.ascontiguousarray(getattr(inputs, name).swapaxes(0, 1))
                for name in ("input", "input_h", "input_c")
            }
            inputs = replace(inputs, **first)
        outputs = bench.forward(inputs, replace(LSTM, time_major=is_time_major))
        expected = RnnDataLayout(0 if is_time_major else 2)
        assert bench.last_arguments("cudnnSetRNNDataDescriptor")[2] == expected
        assert bench.last_arguments("cudnnRNNForward")[5] == inputs.input.ctypes.data
        assert bench.last_arguments("cudnnRNNForward")[7] == outputs.output.ctypes.data

    def test_a_vector_that_is_a_weight_space_is_not_copied(self, bench: Bench) -> None:
        inputs = make_inputs()
        outputs = bench.forward(inputs)
        assert bench.last_arguments("cudnnRNNForward")[15] == inputs.params.ctypes.data
        gradient = bench.backprop(inputs, outputs).params_backprop
        assert bench.last_arguments("cudnnRNNBackwardWeights_v8")[11] == gradient.ctypes.data

    def test_cells_are_for_lstm_only(self, bench: Bench) -> None:
        inputs = replace(make_inputs(layers=1), params=np.zeros(UNITS * (INPUT + UNITS + 2), np.float32))
        outputs = bench.forward(inputs, ForwardAttributes(rnn_mode="rnn_tanh"))
        assert bench.last_arguments("cudnnRNNForward")[11:14] == (None, None, None)
        assert (outputs.output_c.shape, outputs.output_c.item()) == ((), 0)


class TestDescriptors:
    def test_are_made_once(self, bench: Bench) -> None:
        for batch in (BATCH, BATCH + 1):
            inputs = make_inputs(batch=batch)
            for _ in range(3):
                bench.backprop(inputs, bench.forward(inputs))
        assert bench.loads == 1
        assert bench.fake.kinds() == sorted([*OF_LSTM, *OF_LSTM[1:]])
        assert bench.fake.count("cudnnGetRNNWeightSpaceSize") == 2

    def test_lengths_are_set_when_they_change(self, bench: Bench) -> None:
        counts = []
        for lengths in ([4, 4, 4], [4, 4, 4], [2, 4, 1], [2, 4, 1], None):
            bench.forward(make_inputs(lengths=lengths))
            counts.append(bench.fake.count("cudnnSetRNNDataDescriptor"))
        assert counts == [2, 2, 4, 4, 6]
        assert bench.last_arguments("cudnnSetRNNDataDescriptor")[3:6] == (STEPS, BATCH, UNITS)

    def test_those_that_were_not_used_for_long_are_destroyed(self, bench: Bench) -> None:
        for batch in range(1, KEPT_NETWORKS + 1):
            bench.forward(make_inputs(batch=batch))
        bench.forward(make_inputs(batch=1))
        bench.forward(make_inputs(batch=KEPT_NETWORKS + 1))
        assert bench.fake.kinds().count("RNNDescriptor") == KEPT_NETWORKS
        created = bench.fake.count("cudnnCreateRNNDescriptor")
        bench.forward(make_inputs(batch=1))
        assert bench.fake.count("cudnnCreateRNNDescriptor") == created
        bench.forward(make_inputs(batch=2))
        assert bench.fake.count("cudnnCreateRNNDescriptor") == created + 1

    def test_end_with_their_thread(self, bench: Bench) -> None:
        thread = threading.Thread(target=bench.forward, args=(make_inputs(),))
        thread.start()
        thread.join()
        gc.collect()
        assert bench.fake.kinds() == []

    def test_end_with_the_op(self, bench: Bench) -> None:
        bench.forward(make_inputs())
        del bench.op
        gc.collect()
        assert bench.fake.kinds() == []
        assert bench.fake.count("cudnnDestroy") == 1

    @pytest.mark.parametrize("name", ["cudnnSetRNNDescriptor_v8", "cudnnGetRNNWeightSpaceSize"])
    def test_are_destroyed_when_making_them_fails(self, bench: Bench, name: str) -> None:
        bench.fake.statuses[name] = EXECUTION_FAILED
        with pytest.raises(InternalError):
            bench.forward(make_inputs())
        assert bench.fake.kinds() == [""]
        del bench.fake.statuses[name]
        bench.forward(make_inputs())

    def test_every_thread_has_its_own(self, bench: Bench) -> None:
        inputs, together = make_inputs(), threading.Barrier(4)

        def work(_: int) -> bytes:
            together.wait()
            result: bytes = bench.forward(inputs).output.tobytes()
            together.wait()
            return result

        with ThreadPoolExecutor(4) as threads:
            assert len(set(threads.map(work, range(4)))) == 1
            streams = [arguments[1] for name, arguments in bench.fake.calls if name == "cudnnSetStream"]
            assert len(set(streams)) == 4
            assert bench.fake.kinds() == sorted(OF_LSTM * 4)


class TestErrors:
    @pytest.mark.parametrize(
        ("status", "expected"),
        [
            (Status.CUDNN_STATUS_NOT_SUPPORTED, InvalidArgumentError),
            (Status.CUDNN_STATUS_NOT_SUPPORTED_SHAPE, InvalidArgumentError),
            (Status.CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED, MemoryError),
            (Status.CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED, MemoryError),
            (EXECUTION_FAILED, InternalError),
            (3007, InternalError),
            (12345, InternalError),
        ],
    )
    @pytest.mark.parametrize("name", ["cudnnCreate", "cudnnSetRNNDescriptor_v8", "cudnnRNNForward"])
    def test_say_which_call_failed_and_why(
        self, bench: Bench, name: str, status: int, expected: type[Exception]
    ) -> None:
        bench.fake.statuses[name] = status
        with pytest.raises(expected) as raised:
            bench.forward(make_inputs())
        assert str(raised.value) == f"{name} of cuDNN {VERSION} failed: CUDNN_STATUS_SPOILED: something was odd"

    @pytest.mark.parametrize("name", ["cudnnRNNBackwardData_v8", "cudnnRNNBackwardWeights_v8"])
    def test_of_backprop(self, bench: Bench, name: str) -> None:
        inputs = make_inputs()
        outputs = bench.forward(inputs)
        bench.fake.statuses[name] = EXECUTION_FAILED
        with pytest.raises(InternalError, match=name):
            bench.backprop(inputs, outputs)

    def test_a_failing_destruction_is_logged(self, bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
        bench.forward(make_inputs())
        bench.fake.statuses["cudnnDestroy"] = EXECUTION_FAILED
        del bench.op
        gc.collect()
        assert [record.getMessage().split()[0] for record in caplog.records] == ["cudnnDestroy"]

    def test_without_cudnn_there_is_an_op_but_no_call(self, compiled: Path) -> None:
        def load() -> Cudnn:
            raise InternalError("there is none")

        op, inputs = CudaCudnnRnn(HostDevice(compiled), ReserveKey(), load), make_inputs()
        with pytest.raises(InternalError, match="there is none"):
            op.forward(inputs, plan_forward(inputs, LSTM).problem)

    def test_sizes_of_more_than_32_bits(self, bench: Bench) -> None:
        inputs = make_inputs()
        problem = plan_forward(inputs, LSTM).problem
        large = replace(problem, network=replace(problem.network, num_units=2**30))
        with pytest.raises(InvalidArgumentError, match=f"sizes of at most 32 bits, got {BATCH * 2**30}"):
            bench.op.forward(inputs, large)

    def test_other_parameters_than_the_networks(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        places, num_bytes = {(0, 0, False): (0, 2, 2)}, 4 * plan_forward(make_inputs(), LSTM).problem.network.num_params
        monkeypatch.setattr(bench.fake, "_space", lambda rnn: (places, num_bytes))
        with pytest.raises(InternalError, match=r"other parameters than the network.* has shape \(1, 2, 2\)"):
            bench.forward(make_inputs())

    @pytest.mark.parametrize(("lengths", "what"), [([2, 0, 4], "got 0 at index 1"), ([5, 1, 1], "got 5 at index 0")])
    def test_lengths(self, bench: Bench, lengths: list[int], what: str) -> None:
        inputs = make_inputs()
        outputs = bench.forward(inputs)
        wrong = replace(inputs, sequence_lengths=np.array(lengths, np.int32))
        for call in (lambda: bench.forward(wrong), lambda: bench.backprop(wrong, outputs)):
            with pytest.raises(InvalidArgumentError, match=what) as raised:
                call()
            assert raised.value.field == "sequence_lengths"


class TestReserve:
    def test_cudnn_gets_what_it_asks_for_behind_the_header(self, bench: Bench) -> None:
        outputs = bench.forward(make_inputs(lengths=[2, 4, 1]))
        asked = 16 + 5 * STEPS * BATCH
        assert bench.last_arguments("cudnnRNNForward")[18:] == (asked, outputs.reserve_space.ctypes.data + 256)
        assert 0 <= outputs.reserve_space.nbytes - (256 + asked) < 16
        assert outputs.reserve_space.view(np.int8)[:128].tobytes() == outputs.host_reserved.tobytes()
        assert not outputs.reserve_space.view(np.int8)[128:256].any()

    def test_of_sequences_of_other_lengths(self, bench: Bench) -> None:
        inputs = make_inputs(lengths=[2, 4, 1])
        outputs = bench.forward(inputs)
        with pytest.raises(InvalidArgumentError, match="other attributes, dtype, shapes or sequence_lengths"):
            bench.backprop(make_inputs(lengths=[2, 4, 2]), outputs)
        bench.backprop(inputs, outputs)

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
    def test_in_every_dtype(self, bench: Bench, dtype: str) -> None:
        inputs = make_inputs(dtype=np.dtype(dtype))
        outputs = bench.forward(inputs)
        assert outputs.reserve_space.dtype == dtype
        bench.backprop(inputs, outputs)

    @pytest.mark.parametrize(
        ("name", "change", "what"),
        [
            ("reserve_space", lambda array: array[:-1], "expected shape"),
            ("reserve_space", lambda array: array[:3], "at least 128 bytes, got 12"),
            ("reserve_space", lambda array: array[32:], "does not begin with the header"),
            ("host_reserved", lambda array: array[:-1], "expected shape"),
            ("host_reserved", lambda array: array[::-1].copy(), "does not begin with the header"),
        ],
    )
    def test_spoiled(self, bench: Bench, name: str, change: Any, what: str) -> None:
        inputs = make_inputs()
        outputs = bench.forward(inputs)
        with pytest.raises(InvalidArgumentError, match=what) as raised:
            bench.backprop(inputs, outputs, **{name: change(getattr(outputs, name))})
        assert raised.value.field == name
        assert bench.fake.count("cudnnRNNBackwardData_v8") == 0

    @pytest.mark.parametrize("place", [48, 96, 111, 112, 127, 128, 255, 256, 300, -1])
    def test_changed(self, bench: Bench, place: int) -> None:
        """In the id of the call, in the tag, and in the content, cuDNN's and ours."""
        inputs = make_inputs()
        outputs = bench.forward(inputs)
        space, reserved = outputs.reserve_space.copy(), outputs.host_reserved.copy()
        space.view(np.uint8)[place] ^= 0x80
        reserved[...] = space.view(np.int8)[:128]
        with pytest.raises(InvalidArgumentError, match="its content was changed") as raised:
            bench.backprop(inputs, outputs, reserve_space=space, host_reserved=reserved)
        assert raised.value.field == "reserve_space"
        assert bench.fake.count("cudnnRNNBackwardData_v8") == 0

    def test_of_another_run_of_the_server(self, bench: Bench, compiled: Path) -> None:
        inputs = make_inputs()
        outputs = bench.forward(inputs)
        restarted = CudaCudnnRnn(bench.device, ReserveKey(), bench.load)
        with pytest.raises(InvalidArgumentError, match="from before this one was restarted") as raised:
            restarted.backprop(backprop_inputs(inputs, outputs), plan_forward(inputs, LSTM).problem)
        assert raised.value.field == "reserve_space"

    def test_of_another_call(self, bench: Bench) -> None:
        inputs = make_inputs()
        outputs, others = bench.forward(inputs), bench.forward(inputs)
        with pytest.raises(InvalidArgumentError, match="another call") as raised:
            bench.backprop(inputs, outputs, host_reserved=others.host_reserved)
        assert raised.value.field == "host_reserved"
        bench.backprop(inputs, outputs, host_reserved=None)

    def test_of_another_problem_gpu_version_or_order(self, bench: Bench) -> None:
        inputs = make_inputs()
        outputs = bench.forward(inputs)
        with pytest.raises(InvalidArgumentError, match="other attributes"):
            bench.backprop(inputs, outputs, DROPOUT)
        problem = replace(plan_forward(inputs, LSTM).problem, time_major=False)
        with pytest.raises(InvalidArgumentError, match=r"made on cudnn92800-90b, got one made on cudnn92800-90t"):
            bench.op.backprop(backprop_inputs(inputs, outputs), problem)
        bench.device.compute_capability = "100"
        with pytest.raises(InvalidArgumentError, match="made on cudnn92800-100t"):
            bench.backprop(inputs, outputs)


class TestPreparation:
    def test_runs_every_cell_in_every_dtype(self, bench: Bench) -> None:
        bench.op.prepare(lambda: False)
        assert bench.fake.count("cudnnRNNForward") == 3 * len(Mode)
        assert bench.fake.count("cudnnRNNBackwardWeights_v8") == 3 * len(Mode)

    def test_stops_between_two(self, bench: Bench) -> None:
        answers = iter([False, False, True])
        bench.op.prepare(lambda: next(answers))
        assert bench.fake.count("cudnnRNNForward") == 2


def test_a_problem_is_found_whatever_its_seed(bench: Bench) -> None:
    inputs = make_inputs()
    problems: list[Problem] = [plan_forward(inputs, replace(DROPOUT, seed=seed)).problem for seed in range(5)]
    for problem in problems:
        bench.op.forward(inputs, problem)
    assert bench.fake.count("cudnnCreateRNNDescriptor") == 1
