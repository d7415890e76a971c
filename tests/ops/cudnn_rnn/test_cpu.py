"""CudnnRNN and CudnnRNNBackprop on the host, beside PyTorch and beside the reference."""

import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from gradserve_protocol.memory.pool import BufferPool
from gradserve_server.devices.device import CpuDevice
from gradserve_server.devices.host.kernels import ForkJoin
from gradserve_server.errors import InvalidArgumentError
from gradserve_server.ops.cudnn_rnn.cpu.family import CpuCudnnRnn
from gradserve_server.ops.cudnn_rnn.declaration import plan_backprop, plan_forward
from gradserve_server.ops.cudnn_rnn.reserve import ReserveKey
from gradserve_server.ops.cudnn_rnn.spec import (
    HEADER_BYTES,
    BackpropOutputs,
    ForwardAttributes,
    ForwardInputs,
    ForwardOutputs,
)
from tests.golden.cudnn_rnn import Case, assert_outputs, load_cases
from tests.ops.cudnn_rnn.random_calls import FORWARD_OUTPUTS, Call, DirtyDevice, Numbers, numbers
from tests.ops.cudnn_rnn.reference import OutputGradients, cudnn_rnn
from tests.together import together

MODES = ("rnn_relu", "rnn_tanh", "lstm", "gru")
CASES = load_cases()


@pytest.fixture(scope="module")
def parallel() -> Iterator[ForkJoin]:
    """Three threads, so that a batch is not cut into equal parts."""
    made = ForkJoin(3)
    yield made
    made.close()


@pytest.fixture(scope="module")
def kernels(parallel: ForkJoin, _compiled_kernels: None) -> CpuCudnnRnn:
    prepared = CpuCudnnRnn(DirtyDevice(BufferPool(1 << 26)), parallel, ReserveKey(Numbers()))
    prepared.prepare(lambda: False)
    return prepared


@pytest.fixture(scope="module")
def numpy_only(parallel: ForkJoin) -> CpuCudnnRnn:
    return CpuCudnnRnn(DirtyDevice(BufferPool(1 << 26)), parallel, ReserveKey(Numbers()))


@pytest.fixture(params=["kernels", "numpy_only"])
def rnn(request: pytest.FixtureRequest) -> CpuCudnnRnn:
    """Before `prepare`, and after."""
    prepared: CpuCudnnRnn = request.getfixturevalue(request.param)
    return prepared


def assert_near_reference(call: Call, results: tuple[ForwardOutputs, BackpropOutputs], error: float = 1e-12) -> None:
    expected = call.expected()
    for name, array in numbers(*results).items():
        assert (array.dtype, array.shape) == (expected[name].dtype, expected[name].shape), name
        np.testing.assert_allclose(array, expected[name], atol=error * np.abs(expected[name]).max(), rtol=0)


class TestBesidePyTorch:
    @together("case", CASES)
    def test_outputs(self, rnn: CpuCudnnRnn, case: Case) -> None:
        planned = plan_forward(case.inputs, case.attributes).output_specs
        forward = rnn.forward(case.inputs, case.problem)
        assert_outputs(case, forward)
        inputs = case.backprop_inputs(forward)
        backprop = rnn.backprop(inputs, plan_backprop(inputs, case.attributes).problem)
        assert_outputs(case, backprop)
        assert all(array.flags.c_contiguous for array in (*vars(forward).values(), *vars(backprop).values()))
        for array, spec in zip(vars(forward).values(), planned, strict=True):
            assert (array.dtype, len(array.shape)) == (spec.dtype, len(spec.shape))
            assert array.size <= np.prod(spec.shape)


def shapes_of_all_ways() -> Iterator[dict[str, Any]]:
    """Sizes for which all is done by the kernels, and for which products are BLAS's."""
    for direction, lengths in itertools.product(("unidirectional", "bidirectional"), (None, "unequal")):
        for batch, units in ((1, 1), (1, 130), (1, 300), (2, 37), (3, 16), (5, 130), (16, 7), (37, 20)):
            yield {"direction": direction, "lengths": lengths, "batch": batch, "units": units}


class TestBesideTheReference:
    @pytest.mark.sampled
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("shape", [*shapes_of_all_ways()], ids=lambda shape: "-".join(map(str, shape.values())))
    def test_every_way_to_compute(self, rnn: CpuCudnnRnn, mode: str, shape: dict[str, Any]) -> None:
        batch, units = shape["batch"], shape["units"]
        lengths = [1 + 3 * index % 7 for index in range(batch)] if shape["lengths"] else None
        attributes = ForwardAttributes(rnn_mode=mode, direction=shape["direction"])
        call = Call(attributes, steps=7, batch=batch, units=units, input_size=5, lengths=lengths)
        # Without gates, values of many units saturate: small weights keep the comparison meaningful.
        call.inputs = replace(call.inputs, params=call.inputs.params / np.sqrt(units))
        assert_near_reference(call, call.run(rnn))

    @pytest.mark.sampled
    @pytest.mark.parametrize("time_major", [True, False])
    @pytest.mark.parametrize("direction", ["unidirectional", "bidirectional"])
    @pytest.mark.parametrize("mode", MODES)
    def test_dropout_is_that_of_the_seed(
        self, rnn: CpuCudnnRnn, mode: str, direction: str, *, time_major: bool
    ) -> None:
        attributes = ForwardAttributes(
            rnn_mode=mode, direction=direction, dropout=0.4, seed=3, seed2=9, time_major=time_major
        )
        call = Call(attributes, layers=3, lengths=[5, 2, 4])
        results = call.run(rnn)
        assert_near_reference(call, results)
        other = Call(replace(attributes, seed=4), layers=3, lengths=[5, 2, 4]).run(rnn)
        assert not np.array_equal(results[0].output, other[0].output)

    @pytest.mark.parametrize(
        "attributes",
        [
            ForwardAttributes(num_proj=2),
            *(ForwardAttributes(rnn_mode=mode, input_mode="linear_input") for mode in MODES),
            *(ForwardAttributes(rnn_mode=mode, input_mode="skip_input") for mode in MODES),
        ],
        ids=lambda attributes: f"{attributes.rnn_mode}-{attributes.num_proj}-{attributes.input_mode}",
    )
    @pytest.mark.parametrize("batch", [1, 6])
    def test_one_step(self, rnn: CpuCudnnRnn, attributes: ForwardAttributes, batch: int) -> None:
        call = Call(attributes, steps=1, batch=batch)
        assert_near_reference(call, call.run(rnn))

    def test_unaligned_and_read_only_inputs(self, rnn: CpuCudnnRnn) -> None:
        call = Call(ForwardAttributes(), dtype=np.float32, lengths=[2, 5, 3])
        expected = numbers(*call.run(rnn))
        call.inputs = ForwardInputs(**{name: _shifted(array) for name, array in vars(call.inputs).items()})
        call.gradients = OutputGradients(**{name: _shifted(array) for name, array in vars(call.gradients).items()})
        forward = rnn.forward(call.inputs, call.problem)
        moved = ForwardOutputs(**{name: _shifted(array) for name, array in vars(forward).items()})
        backprop = rnn.backprop(call.backprop_inputs(moved), call.problem)
        for name, array in numbers(forward, backprop).items():
            np.testing.assert_array_equal(array, expected[name])


def _shifted(array: NDArray[Any]) -> NDArray[Any]:
    """Returns a copy at an odd address, as it may come out of a message."""
    content = b"\0" + array.tobytes()
    return np.frombuffer(content, np.uint8)[1:].view(array.dtype).reshape(array.shape)


class TestInference:
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("lengths", [None, [2, 5, 3]])
    def test_nothing_is_reserved_and_nothing_dropped(
        self, rnn: CpuCudnnRnn, mode: str, lengths: list[int] | None
    ) -> None:
        attributes = ForwardAttributes(rnn_mode=mode, direction="bidirectional", is_training=False, dropout=0.5)
        call = Call(attributes, lengths=lengths)
        outputs = rnn.forward(call.inputs, call.problem)
        trace = cudnn_rnn(np, call.inputs, call.problem)
        for name in FORWARD_OUTPUTS:
            np.testing.assert_allclose(getattr(outputs, name), getattr(trace, name), atol=1e-13)
        for reserved, dtype in ((outputs.reserve_space, np.float64), (outputs.host_reserved, np.int8)):
            assert (reserved.shape, reserved.dtype, reserved) == ((), dtype, 0)


class TestEnds:
    @pytest.mark.sampled
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("batch", [2, 40])
    def test_what_is_beyond_the_end_does_not_count(self, rnn: CpuCudnnRnn, mode: str, batch: int) -> None:
        """Not even when it is NaN."""
        lengths = [1 + index % 5 for index in range(batch)]
        beyond = np.arange(5)[:, None] >= np.array(lengths)
        call = Call(ForwardAttributes(rnn_mode=mode, direction="bidirectional"), units=40, batch=batch, lengths=lengths)
        expected = numbers(*call.run(rnn))
        call.inputs.input[beyond] = np.nan
        call.gradients.output_backprop[beyond] = np.nan
        outputs = numbers(*call.run(rnn))
        for name, array in outputs.items():
            np.testing.assert_array_equal(array, expected[name], err_msg=name)
        assert not outputs["output"][beyond].any()
        assert not outputs["input_backprop"][beyond].any()

    @pytest.mark.parametrize("wrong", [0, -1, 6, 2**31 - 1, -(2**31)])
    def test_impossible_lengths(self, rnn: CpuCudnnRnn, wrong: int) -> None:
        call = Call(ForwardAttributes(), lengths=[5, 1, 3])
        forward = rnn.forward(call.inputs, call.problem)
        call.inputs = replace(call.inputs, sequence_lengths=np.array([5, wrong, 3], np.int32))
        message = rf"sequence_lengths must be from 1 to max_seq_length, which is 5, got {wrong} at index 1"
        with pytest.raises(InvalidArgumentError, match=message) as caught:
            rnn.forward(call.inputs, call.problem)
        assert caught.value.field == "sequence_lengths"
        with pytest.raises(InvalidArgumentError, match=message):
            rnn.backprop(call.backprop_inputs(forward), call.problem)


class TestNumbersOutOfTheOrdinary:
    @pytest.mark.sampled
    @pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
    @pytest.mark.parametrize("mode", MODES)
    def test_nan_comes_out_where_it_goes_in(self, rnn: CpuCudnnRnn, mode: str, dtype: Any) -> None:
        call = Call(ForwardAttributes(rnn_mode=mode), dtype=dtype, layers=1)
        call.inputs.input[2, 1] = np.nan
        output = rnn.forward(call.inputs, call.problem).output
        assert np.isnan(output[2:, 1]).all()
        assert np.isfinite(output[:2]).all()
        assert np.isfinite(output[:, [0, 2]]).all()

    @pytest.mark.parametrize("mode", ["rnn_tanh", "lstm", "gru"])
    def test_infinite_inputs_saturate(self, rnn: CpuCudnnRnn, mode: str) -> None:
        call = Call(ForwardAttributes(rnn_mode=mode), layers=1, dtype=np.float32)
        call.inputs.input[...] *= np.float32(1e30)
        output = rnn.forward(call.inputs, call.problem).output
        assert np.isfinite(output).all()
        assert np.abs(output).max() <= 1


class TestSeveralCalls:
    @pytest.mark.parametrize("shape", [{"batch": 1, "units": 300}, {"batch": 5, "units": 40}])
    def test_the_same_call_gives_the_same_bits(self, rnn: CpuCudnnRnn, shape: dict[str, int]) -> None:
        call = Call(ForwardAttributes(dropout=0.3), dtype=np.float32, lengths=[4] * shape["batch"], **shape)
        first, second = call.run(rnn), call.run(rnn)
        for name, array in numbers(*first).items():
            np.testing.assert_array_equal(array, numbers(*second)[name])
        saved = [each.reserve_space.view(np.uint8)[HEADER_BYTES:] for each, _ in (first, second)]
        np.testing.assert_array_equal(*saved)

    @pytest.mark.sampled(every=3)
    @pytest.mark.parametrize("mode", MODES)
    def test_threads_do_not_disturb_each_other(self, kernels: CpuCudnnRnn, mode: str) -> None:
        calls = [
            Call(ForwardAttributes(rnn_mode=mode), batch=batch, units=260, steps=9, dtype=np.float32, seed=batch)
            for batch in (1, 2, 5)
        ]
        expected = [numbers(*call.run(kernels)) for call in calls]
        barrier = threading.Barrier(2 * len(calls))

        def repeat(index: int) -> bool:
            barrier.wait()
            for _ in range(5):
                outputs = numbers(*calls[index].run(kernels))
                if any(not np.array_equal(array, expected[index][name]) for name, array in outputs.items()):
                    return False
            return True

        with ThreadPoolExecutor(2 * len(calls)) as threads:
            assert all(threads.map(repeat, [*range(len(calls)), *range(len(calls))]))

    @pytest.mark.sampled
    @pytest.mark.usefixtures("_compiled_kernels")
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("direction", ["unidirectional", "bidirectional"])
    def test_one_sequence_gives_the_same_bits_on_any_number_of_threads(self, mode: str, direction: str) -> None:
        """With sizes for which the products over all steps are not cut into parts for BLAS."""
        attributes = ForwardAttributes(rnn_mode=mode, direction=direction)
        call = Call(attributes, steps=9, batch=1, units=160, layers=1, dtype=np.float32)
        results = []
        for num_threads in (1, 2, 5):
            threads = ForkJoin(num_threads)
            prepared = CpuCudnnRnn(DirtyDevice(BufferPool(1 << 26)), threads, ReserveKey(Numbers()))
            prepared.prepare(lambda: False)
            results += [numbers(*call.run(prepared)) for _ in range(5)]
            threads.close()
        for other in results[1:]:
            for name, array in results[0].items():
                np.testing.assert_array_equal(array, other[name], err_msg=name)

    def test_two_backward_calls_for_one_forward_call(self, rnn: CpuCudnnRnn) -> None:
        call = Call(ForwardAttributes(dropout=0.5))
        forward = rnn.forward(call.inputs, call.problem)
        kept = forward.reserve_space.copy()
        first, second = (rnn.backprop(call.backprop_inputs(forward), call.problem) for _ in range(2))
        np.testing.assert_array_equal(first.params_backprop, second.params_backprop)
        np.testing.assert_array_equal(forward.reserve_space, kept)

    def test_reserve_space_of_either_implementation_serves_the_other(
        self, kernels: CpuCudnnRnn, numpy_only: CpuCudnnRnn
    ) -> None:
        """A call may be prepared between the two."""
        call = Call(ForwardAttributes(rnn_mode="gru", direction="bidirectional", dropout=0.2), lengths=[1, 5, 2])
        for first, second in ((kernels, numpy_only), (numpy_only, kernels)):
            forward = first.forward(call.inputs, call.problem)
            assert_near_reference(call, (forward, second.backprop(call.backprop_inputs(forward), call.problem)))

    def test_preparing_can_be_stopped(self, parallel: ForkJoin) -> None:
        rnn = CpuCudnnRnn(CpuDevice(BufferPool(0)), parallel, ReserveKey(Numbers()))
        rnn.prepare(lambda: True)
        call = Call(ForwardAttributes())
        assert_near_reference(call, call.run(rnn))


LSTM = ForwardAttributes(dropout=0.25)
OTHER_PROBLEMS = {
    "mode": {"attributes": replace(LSTM, rnn_mode="gru")},
    "directions": {"attributes": replace(LSTM, direction="bidirectional"), "layers": 1},
    "dropout": {"attributes": replace(LSTM, dropout=0.5)},
    "no dropout": {"attributes": replace(LSTM, dropout=0.0)},
    "seed": {"attributes": replace(LSTM, seed=1)},
    "seed2": {"attributes": replace(LSTM, seed2=1)},
    "projection": {"attributes": replace(LSTM, num_proj=2)},
    "dtype": {"attributes": LSTM, "dtype": np.float32},
    "steps": {"attributes": LSTM, "steps": 6},
    "batch": {"attributes": LSTM, "batch": 2},
    "steps and batch swapped": {"attributes": LSTM, "steps": 3, "batch": 5},
    "input size": {"attributes": LSTM, "input_size": 3},
    "units": {"attributes": LSTM, "units": 5},
    "layers": {"attributes": LSTM, "layers": 3},
    "lengths": {"attributes": LSTM, "lengths": [5, 3, 5]},
}


class TestReserve:
    @pytest.fixture
    def call(self) -> Call:
        return Call(LSTM)

    @pytest.fixture
    def forward(self, kernels: CpuCudnnRnn, call: Call) -> ForwardOutputs:
        return kernels.forward(call.inputs, call.problem)

    def refusal(self, rnn: CpuCudnnRnn, call: Call, forward: ForwardOutputs, **changed: Any) -> InvalidArgumentError:
        with pytest.raises(InvalidArgumentError, match="must be as CudnnRNN returned it") as caught:
            rnn.backprop(call.backprop_inputs(replace(forward, **changed)), call.problem)
        return caught.value

    @pytest.mark.parametrize("changes", OTHER_PROBLEMS.values(), ids=OTHER_PROBLEMS)
    def test_of_another_problem(
        self, kernels: CpuCudnnRnn, call: Call, forward: ForwardOutputs, changes: dict[str, Any]
    ) -> None:
        other = Call(**changes)
        outputs = kernels.forward(other.inputs, other.problem)
        error = self.refusal(kernels, call, forward, reserve_space=outputs.reserve_space.astype(np.float64))
        assert error.field == "reserve_space"
        error = self.refusal(kernels, call, forward, host_reserved=outputs.host_reserved)
        assert error.field == "host_reserved"
        assert "other attributes, dtype, shapes or sequence_lengths" in error.message

    def test_of_another_call(self, kernels: CpuCudnnRnn, call: Call, forward: ForwardOutputs) -> None:
        other = kernels.forward(call.inputs, call.problem)
        error = self.refusal(kernels, call, forward, host_reserved=other.host_reserved)
        assert (error.field, "another call than reserve_space" in error.message) == ("host_reserved", True)

    def test_of_the_other_order_of_dimensions(self, kernels: CpuCudnnRnn, call: Call) -> None:
        """What is saved is the same."""
        other = Call(replace(LSTM, time_major=False))
        assert other.problem != call.problem
        forward = kernels.forward(call.inputs, call.problem)
        kernels.backprop(other.backprop_inputs(forward), other.problem)

    def test_without_host_reserved(self, kernels: CpuCudnnRnn, call: Call, forward: ForwardOutputs) -> None:
        inputs = replace(call.backprop_inputs(forward), host_reserved=None)
        outputs = kernels.backprop(inputs, call.problem)
        expected = kernels.backprop(call.backprop_inputs(forward), call.problem)
        np.testing.assert_array_equal(outputs.params_backprop, expected.params_backprop)

    @pytest.mark.parametrize("length", [0, 1, 7, 8, 9, -1])
    @pytest.mark.parametrize("field", ["reserve_space", "host_reserved"])
    def test_of_a_wrong_length(
        self, kernels: CpuCudnnRnn, call: Call, forward: ForwardOutputs, field: str, length: int
    ) -> None:
        given = getattr(forward, field)
        error = self.refusal(kernels, call, forward, **{field: given[:length].copy()})
        assert error.field == field

    @pytest.mark.parametrize("field", ["reserve_space", "host_reserved"])
    def test_that_is_too_long(self, kernels: CpuCudnnRnn, call: Call, forward: ForwardOutputs, field: str) -> None:
        given = getattr(forward, field)
        error = self.refusal(kernels, call, forward, **{field: np.append(given, given[-1:])})
        assert (error.field, f"got [{len(given) + 1}]" in error.message) == (field, True)

    @pytest.mark.parametrize("field", ["reserve_space", "host_reserved"])
    @pytest.mark.parametrize(
        ("position", "message"),
        [
            (0, "does not begin with the header"),
            (8, "expected version 3 of the format, got 252"),
            (16, r"expected one made on cpu, got one made on \x9cpu"),
            (32, "other attributes, dtype, shapes or sequence_lengths"),
            (64, "another server, or from before this one was restarted"),
        ],
    )
    def test_with_another_header(
        self, kernels: CpuCudnnRnn, call: Call, forward: ForwardOutputs, field: str, position: int, message: str
    ) -> None:
        changed = getattr(forward, field).copy()
        changed.view(np.uint8)[position] ^= 0xFF
        error = self.refusal(kernels, call, forward, **{field: changed})
        assert message in error.message
        assert error.field == field

    @pytest.mark.parametrize("position", [48, 63, 96, 127])
    def test_with_another_call_or_tag(
        self, kernels: CpuCudnnRnn, call: Call, forward: ForwardOutputs, position: int
    ) -> None:
        space, reserved = forward.reserve_space.copy(), forward.host_reserved.copy()
        for changed in (space, reserved):
            changed.view(np.uint8)[position] ^= 1
        assert "another call" in self.refusal(kernels, call, forward, host_reserved=reserved).message
        error = self.refusal(kernels, call, forward, reserve_space=space, host_reserved=reserved)
        assert (error.field, "its content was changed" in error.message) == ("reserve_space", True)

    def test_of_another_run_of_the_server(self, parallel: ForkJoin, call: Call, forward: ForwardOutputs) -> None:
        restarted = CpuCudnnRnn(CpuDevice(BufferPool(0)), parallel, ReserveKey())
        error = self.refusal(restarted, call, forward)
        assert (error.field, "before this one was restarted" in error.message) == ("reserve_space", True)

    def test_of_inference(self, kernels: CpuCudnnRnn, call: Call, forward: ForwardOutputs) -> None:
        nothing = np.zeros((), np.float64)
        assert self.refusal(kernels, call, forward, reserve_space=nothing).field == "reserve_space"

    @settings(max_examples=60, deadline=None)
    @given(noise=st.binary(max_size=200), start=st.integers(0, 2**16))
    @example(noise=b"\xff" * 200, start=HEADER_BYTES)
    def test_noise(self, kernels: CpuCudnnRnn, noise: bytes, start: int) -> None:
        """Whatever is changed is refused."""
        call = Call(LSTM, lengths=[1, 5, 3])
        forward = kernels.forward(call.inputs, call.problem)
        content = forward.reserve_space.view(np.uint8)
        before, start = content.tobytes(), start % len(content)
        changed = content[start : start + len(noise)]
        changed[...] = np.frombuffer(noise, np.uint8)[: len(changed)]
        inputs = call.backprop_inputs(forward)
        if content.tobytes() != before:
            with pytest.raises(InvalidArgumentError) as raised:
                kernels.backprop(inputs, call.problem)
            assert raised.value.field in ("reserve_space", "host_reserved")
        else:
            shape = kernels.backprop(inputs, call.problem).params_backprop.shape
            assert shape == call.inputs.params.shape

    @settings(max_examples=40, deadline=None)
    @given(noise=st.binary(max_size=400))
    def test_nothing_but_noise(self, kernels: CpuCudnnRnn, noise: bytes) -> None:
        call = Call(LSTM)
        forward = kernels.forward(call.inputs, call.problem)
        given_space = np.frombuffer(noise[: len(noise) // 8 * 8], np.float64)
        assert self.refusal(kernels, call, forward, reserve_space=given_space).field == "reserve_space"
        assert (
            self.refusal(kernels, call, forward, host_reserved=np.frombuffer(noise, np.int8)).field == "host_reserved"
        )

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("lengths", [None, [1, 3, 2]])
    def test_it_holds_nothing_of_others(self, kernels: CpuCudnnRnn, mode: str, lengths: list[int] | None) -> None:
        """Memory that was somebody else's is overwritten: the device's is full of NaN."""
        attributes = ForwardAttributes(rnn_mode=mode, direction="bidirectional", dropout=0.25)
        call = Call(attributes, lengths=lengths)
        kept = kernels.forward(call.inputs, call.problem).reserve_space.view(np.uint8)[HEADER_BYTES:]
        floats = kept[: len(kept) // 8 * 8].view(np.uint64)
        assert not (floats == 2**64 - 1).any()
