"""A stand-in for libcudnn.so.9: it takes what ctypes gives it, keeps account of it, and computes by the reference.

It is as strict as cuDNN or stricter, and does what cuDNN may do to its callers' surprise: the order of the weight space
is its own, its generator goes on with every call, it does not write what lies beyond the end of a sequence into the
gradient of the input, and the backward calls write into the reserve space.
"""

import ctypes
import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradserve_server.devices.cuda.cudnn import CHECKED_FUNCTIONS, DataType, RnnDataLayout, RnnMode
from gradserve_server.ops.cudnn_rnn.cpu.family import dropout_masks
from gradserve_server.ops.cudnn_rnn.spec import BackpropOutputs, ForwardInputs, Mode, Network, Problem, split_params
from tests.ops.cudnn_rnn.reference import OutputGradients, Trace, cudnn_rnn, cudnn_rnn_backprop

BAD_PARAM = 2000
EXECUTION_FAILED = 5000
VERSION = 92800
WORK_BYTES, STATES_BYTES = 24, 16
_MODES = {
    RnnMode.CUDNN_RNN_RELU: Mode.RELU,
    RnnMode.CUDNN_RNN_TANH: Mode.TANH,
    RnnMode.CUDNN_LSTM: Mode.LSTM,
    RnnMode.CUDNN_GRU: Mode.GRU,
}
_DTYPES: dict[DataType, np.dtype[Any]] = {
    DataType.CUDNN_DATA_HALF: np.dtype(np.float16),
    DataType.CUDNN_DATA_FLOAT: np.dtype(np.float32),
    DataType.CUDNN_DATA_DOUBLE: np.dtype(np.float64),
}

Key = tuple[int, int, bool]
"""Of a parameter: pseudo-layer, linear layer, and whether it is a bias."""


@dataclass
class Thing:
    """A handle or a descriptor."""

    kind: str
    values: dict[str, Any] = field(default_factory=dict)


@dataclass
class Forward:
    """What a forward call leaves."""

    inputs: ForwardInputs
    problem: Problem
    trace: Trace
    masks: tuple[NDArray[Any], ...]
    backprop: BackpropOutputs | None = None


class FakeCudnn:
    """The library; `is_shuffled` if its weight space is in another order than the parameter vector, and padded."""

    def __init__(self, *, is_shuffled: bool = False) -> None:
        self.is_shuffled = is_shuffled
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.things: dict[int, Thing] = {}
        self.statuses: dict[str, int] = {}
        self.faults: list[Exception] = []
        self._ids = itertools.count(1000)
        self._forwards: dict[int, Forward] = {}
        for name, types in CHECKED_FUNCTIONS.items():
            setattr(self, name, ctypes.CFUNCTYPE(ctypes.c_int, *types)(self._checked(name)))
        self.cudnnGetVersion = ctypes.CFUNCTYPE(ctypes.c_size_t)(lambda: VERSION)
        self._text = ctypes.create_string_buffer(b"CUDNN_STATUS_SPOILED")
        address = ctypes.addressof(self._text)
        self.cudnnGetErrorString = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int)(lambda _: address)
        self.cudnnGetLastErrorString = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t)(self._last_error)

    def names(self) -> list[str]:
        """Of all calls but those that describe something."""
        described = ("Create", "Destroy", "Descriptor", "Get")
        return [name for name, _ in self.calls if not any(word in name for word in described)]

    def count(self, name: str) -> int:
        return [each for each, _ in self.calls].count(name)

    def kinds(self) -> list[str]:
        return sorted(thing.kind for thing in self.things.values())

    def _last_error(self, target: int, size: int) -> None:
        ctypes.memmove(target, b"something was odd\0"[:size], min(size, 18))

    def _checked(self, name: str) -> Callable[..., int]:
        kind = name.removeprefix("cudnnCreate").removeprefix("cudnnDestroy")
        run: Callable[..., Any]
        if name.startswith("cudnnCreate"):

            def run(new: Any) -> None:
                new[0] = next(self._ids)
                self.things[new[0]] = Thing(kind)

        elif name.startswith("cudnnDestroy"):

            def run(address: int) -> None:
                assert self.things.pop(address).kind == kind

        else:
            run = getattr(self, "_" + name.removeprefix("cudnn"))

        def call(*arguments: Any) -> int:
            self.calls.append((name, arguments))
            if name in self.statuses:
                return self.statuses[name]
            try:
                run(*arguments)
            except Exception as fault:
                self.faults.append(fault)
                return EXECUTION_FAILED
            return 0

        return call

    def _values(self, address: int, kind: str) -> dict[str, Any]:
        thing = self.things[address]
        assert thing.kind == kind
        return thing.values

    def _SetStream(self, handle: int, stream: int) -> None:  # noqa: N802
        self._values(handle, "")["stream"] = stream

    def _SetTensorNdDescriptor(self, it: int, data_type: int, count: int, shape: Any, strides: Any) -> None:  # noqa: N802
        values = self._values(it, "TensorDescriptor")
        values |= {"dtype": _DTYPES[DataType(data_type)], "shape": tuple(shape[:count])}
        assert tuple(strides[:count]) == (shape[1] * shape[2], shape[2], 1)

    def _GetTensorNdDescriptor(  # noqa: N802
        self, it: int, most: int, data_type: Any, count: Any, shape: Any, strides: Any
    ) -> None:
        values = self._values(it, "TensorDescriptor")
        data_type[0], count[0] = 0, len(values["shape"])
        assert count[0] <= most
        for index, size in enumerate(values["shape"]):
            shape[index] = size
            strides[index] = int(np.prod(values["shape"][index + 1 :]))

    def _DropoutGetStatesSize(self, handle: int, size: Any) -> None:  # noqa: N802
        size[0] = STATES_BYTES

    def _SetDropoutDescriptor(  # noqa: N802
        self, it: int, handle: int, dropout: float, states: int | None, num_bytes: int, seed: int
    ) -> None:
        self._values(handle, "")
        assert (num_bytes == STATES_BYTES and states) if dropout else (num_bytes == 0 and not states)
        if states:
            _memory(states, (2,), np.dtype(np.uint64))[...] = seed, 0
        self._values(it, "DropoutDescriptor").update(dropout=dropout, states=states)

    def _RestoreDropoutDescriptor(  # noqa: N802
        self, it: int, handle: int, dropout: float, states: int, num_bytes: int, seed: int
    ) -> None:
        assert states
        assert num_bytes == STATES_BYTES
        self._values(it, "DropoutDescriptor").update(dropout=dropout, states=states)

    def _SetRNNDescriptor_v8(  # noqa: N802
        self,
        it: int,
        algorithm: int,
        mode: int,
        bias_mode: int,
        direction: int,
        input_mode: int,
        data_type: int,
        precision: int,
        math_type: int,
        *sizes_and_rest: int,
    ) -> None:
        input_size, units, projection, layers, dropout, flags = sizes_and_rest
        assert (algorithm, bias_mode, flags) == (0, 2, 1)
        assert 0 < projection <= units, "cuDNN refuses 0"
        assert (precision, math_type) == {0: (0, 3), 1: (1, 0), 2: (0, 1)}[data_type]
        self._values(it, "RNNDescriptor").update(
            network=Network(
                _MODES[RnnMode(mode)],
                layers,
                1 + direction,
                input_size,
                units,
                num_proj=projection if projection < units else 0,
                skip_input=bool(input_mode),
            ),
            dtype=_DTYPES[DataType(data_type)],
            dropout=dict(self._values(dropout, "DropoutDescriptor")),
        )

    def _SetRNNDataDescriptor(  # noqa: N802
        self, it: int, data_type: int, layout: int, steps: int, batch: int, size: int, lengths: Any, fill: int
    ) -> None:
        dtype = _DTYPES[DataType(data_type)]
        self._values(it, "RNNDataDescriptor").update(
            dtype=dtype,
            is_time_major=layout == RnnDataLayout.CUDNN_RNN_DATA_LAYOUT_SEQ_MAJOR_UNPACKED,
            steps=steps,
            batch=batch,
            size=size,
            lengths=np.array(lengths[:batch], np.int32),
            fill=_memory(fill, (), dtype).copy(),
        )

    def _GetRNNTempSpaceSizes(  # noqa: N802
        self, handle: int, rnn: int, mode: int, x: int, work: Any, reserve: Any
    ) -> None:
        values = self._values(x, "RNNDataDescriptor")
        work[0] = WORK_BYTES
        reserve[0] = 16 + 5 * int(values["lengths"].sum()) if mode else 0

    def _GetRNNWeightSpaceSize(self, handle: int, rnn: int, size: Any) -> None:  # noqa: N802
        size[0] = self._space(rnn)[1]

    def _GetRNNWeightParams(  # noqa: N802
        self,
        handle: int,
        rnn: int,
        pseudo_layer: int,
        space_bytes: int,
        space: int,
        linear_layer: int,
        *results: Any,
    ) -> None:
        places, num_bytes = self._space(rnn)
        assert num_bytes == space_bytes
        itemsize = self._values(rnn, "RNNDescriptor")["dtype"].itemsize
        for is_bias, descriptor, address in ((False, *results[:2]), (True, *results[2:])):
            start, rows, columns = places.get((pseudo_layer, linear_layer, is_bias), (None, 0, 0))
            address[0] = None if start is None else space + start * itemsize
            self._values(descriptor, "TensorDescriptor")["shape"] = () if start is None else (1, rows, columns)

    def _RNNForward(  # noqa: N802
        self,
        handle: int,
        rnn: int,
        mode: int,
        lengths: None,
        x_descriptor: int,
        x: int,
        y_descriptor: int,
        y: int,
        h_descriptor: int,
        hx: int,
        hy: int,
        c_descriptor: int | None,
        cx: int | None,
        cy: int | None,
        *spaces: Any,
    ) -> None:
        assert lengths is None
        space_bytes, space, work_bytes, work, reserve_bytes, reserve = spaces
        inputs, problem = self._inputs(rnn, x_descriptor, x, h_descriptor, hx, c_descriptor, cx, space, space_bytes)
        dropout = self._values(rnn, "RNNDescriptor")["dropout"]
        if mode and dropout["dropout"]:
            state = _memory(dropout["states"], (2,), np.dtype(np.uint64))
            problem = dataclasses.replace(problem, dropout=dropout["dropout"], seed=int(state[0] + state[1]))
            state[1] += 1  # whoever draws moves the generator on
        masks = dropout_masks(problem)
        trace = cudnn_rnn(np, inputs, problem, masks)
        self._write_sequences(y_descriptor, y, trace.output, inputs)
        self._states(h_descriptor, hy)[...] = trace.output_h
        if c_descriptor is not None:
            self._states(c_descriptor, cy)[...] = trace.output_c
        assert work_bytes == WORK_BYTES
        _memory(work, (work_bytes,), np.dtype(np.uint8))[...] = 0
        if not mode:
            assert (reserve_bytes, reserve) == (0, None)
            return
        assert reserve % 256 == 0
        assert inputs.sequence_lengths is not None
        assert reserve_bytes >= 16 + 5 * int(inputs.sequence_lengths.sum())
        token = next(self._ids)
        _memory(reserve, (2,), np.dtype(np.int64))[...] = token, 0
        self._forwards[token] = Forward(inputs, problem, trace, masks)

    def _RNNBackwardData_v8(  # noqa: N802
        self,
        handle: int,
        rnn: int,
        lengths: None,
        y_descriptor: int,
        y: int,
        dy: int,
        x_descriptor: int,
        dx: int,
        h_descriptor: int,
        hx: int,
        dhy: int,
        dhx: int,
        c_descriptor: int | None,
        cx: int | None,
        dcy: int | None,
        dcx: int | None,
        *spaces: Any,
    ) -> None:
        assert lengths is None
        space_bytes, space, *_, reserve = spaces
        token = _memory(reserve, (2,), np.dtype(np.int64))
        forward = self._forwards[int(token[0])]
        assert token[1] == 0, "it was used before"
        token[1] = 1
        np.testing.assert_array_equal(self._states(h_descriptor, hx), forward.inputs.input_h)
        np.testing.assert_array_equal(self._vector(rnn, space, space_bytes), forward.inputs.params)
        self._check_output(y_descriptor, y, forward)
        gradients = OutputGradients(
            self._sequences(y_descriptor, dy),
            self._states(h_descriptor, dhy).copy(),
            None if c_descriptor is None else self._states(c_descriptor, dcy).copy(),
        )
        if c_descriptor is not None:
            np.testing.assert_array_equal(self._states(c_descriptor, cx), forward.inputs.input_c)
        result = cudnn_rnn_backprop(np, forward.inputs, gradients, forward.trace, forward.problem, forward.masks)
        forward.backprop = result
        self._write_sequences(x_descriptor, dx, result.input_backprop, forward.inputs)
        self._states(h_descriptor, dhx)[...] = result.input_h_backprop
        if c_descriptor is not None:
            self._states(c_descriptor, dcx)[...] = result.input_c_backprop

    def _RNNBackwardWeights_v8(  # noqa: N802
        self,
        handle: int,
        rnn: int,
        mode: int,
        lengths: None,
        x_descriptor: int,
        x: int,
        h_descriptor: int,
        hx: int,
        y_descriptor: int,
        y: int,
        *spaces: Any,
    ) -> None:
        assert (mode, lengths) == (0, None)
        space_bytes, space, *_, reserve = spaces
        token = _memory(reserve, (2,), np.dtype(np.int64))
        forward = self._forwards[int(token[0])]
        assert token[1] == 1, "the data of this reserve space come first"
        token[1] = 2
        np.testing.assert_array_equal(self._sequences(x_descriptor, x), forward.inputs.input)
        np.testing.assert_array_equal(self._states(h_descriptor, hx), forward.inputs.input_h)
        self._check_output(y_descriptor, y, forward)
        assert forward.backprop is not None
        dtype = self._values(rnn, "RNNDescriptor")["dtype"]
        target = _memory(space, (space_bytes // dtype.itemsize,), dtype)
        for start, part in self._parts(rnn, forward.backprop.params_backprop):
            target[start : start + part.size] += part.ravel()

    def _check_output(self, descriptor: int, address: int, forward: Forward) -> None:
        """The output comes back as it was, but for what bfloat16 took away."""
        np.testing.assert_allclose(self._sequences(descriptor, address), forward.trace.output, rtol=2**-8)

    def _inputs(
        self,
        rnn: int,
        x_descriptor: int,
        x: int,
        h_descriptor: int,
        hx: int,
        c_descriptor: int | None,
        cx: int | None,
        space: int,
        space_bytes: int,
    ) -> tuple[ForwardInputs, Problem]:
        """Copies, time first."""
        values, data = self._values(rnn, "RNNDescriptor"), self._values(x_descriptor, "RNNDataDescriptor")
        network: Network = values["network"]
        assert data["size"] == network.input_size
        inputs = ForwardInputs(
            self._sequences(x_descriptor, x),
            self._states(h_descriptor, hx).copy(),
            self._vector(rnn, space, space_bytes),
            None if c_descriptor is None else self._states(c_descriptor, cx).copy(),
            data["lengths"],
        )
        problem = Problem(
            network, values["dtype"], data["steps"], data["batch"], time_major=True, dropout=0, seed=0, is_training=True
        )
        return inputs, problem

    def _sequences(self, descriptor: int, address: int) -> NDArray[Any]:
        """A copy, time first."""
        return np.array(self._view(descriptor, address), order="C")

    def _write_sequences(self, descriptor: int, address: int, sequences: NDArray[Any], inputs: ForwardInputs) -> None:
        """Leaves what lies beyond the ends as it was: whether cuDNN writes its fill there is not to be relied on."""
        values, view = self._values(descriptor, "RNNDataDescriptor"), self._view(descriptor, address)
        is_valid = np.arange(values["steps"])[:, None] < inputs.sequence_lengths[None]  # type: ignore[index]
        view[is_valid] = sequences[is_valid]

    def _view(self, descriptor: int, address: int) -> NDArray[Any]:
        values = self._values(descriptor, "RNNDataDescriptor")
        shape = (values["steps"], values["batch"], values["size"])
        if values["is_time_major"]:
            return _memory(address, shape, values["dtype"])
        return _memory(address, (shape[1], shape[0], shape[2]), values["dtype"]).swapaxes(0, 1)

    def _states(self, descriptor: int, address: int | None) -> NDArray[Any]:
        values = self._values(descriptor, "TensorDescriptor")
        assert address
        return _memory(address, values["shape"], values["dtype"])

    def _space(self, rnn: int) -> tuple[dict[Key, tuple[int, int, int]], int]:
        """Returns where each parameter is, in elements, its rows and columns; and the size of all in bytes."""
        values = self._values(rnn, "RNNDescriptor")
        network: Network = values["network"]
        matrices: dict[Key, tuple[int, int]] = {}
        biases: dict[Key, tuple[int, int]] = {}
        for pseudo_layer in range(network.num_pseudo_layers):
            for gate in range(network.mode.num_gates):
                columns = network.matrix_columns(pseudo_layer // network.num_directions)
                recurrent = network.mode.num_gates + gate
                matrices[pseudo_layer, gate, False] = (network.num_units, columns)
                matrices[pseudo_layer, recurrent, False] = (network.num_units, network.hidden_size)
                for linear_layer in (gate, recurrent):
                    biases[pseudo_layer, linear_layer, True] = (network.num_units, 1)
            if network.num_proj:
                matrices[pseudo_layer, 2 * network.mode.num_gates, False] = (network.num_proj, network.num_units)
        keys = [key for key in sorted(matrices) if matrices[key][1]] + sorted(biases)
        shapes, gap = matrices | biases, 0
        if self.is_shuffled:
            keys, gap = keys[::-1], 3
        places: dict[Key, tuple[int, int, int]] = {}
        position = gap
        for key in keys:
            rows, columns = shapes[key]
            places[key] = (position, rows, columns)
            position += rows * columns + gap
        return places, position * values["dtype"].itemsize

    def _parts(self, rnn: int, vector: NDArray[Any]) -> list[tuple[int, NDArray[Any]]]:
        """Pairs the starts of all parameters in the weight space with views of a parameter vector."""
        network: Network = self._values(rnn, "RNNDescriptor")["network"]
        places, _ = self._space(rnn)
        parts: list[tuple[int, NDArray[Any]]] = []
        units, gates = network.num_units, network.mode.num_gates
        for pseudo_layer, params in enumerate(split_params(network, vector)):
            for gate in range(gates):
                rows = slice(gate * units, (gate + 1) * units)
                for linear_layer, matrix, bias in (
                    (gate, params.input_weights, params.input_bias),
                    (gates + gate, params.recurrent_weights, params.recurrent_bias),
                ):
                    parts.append((places[pseudo_layer, linear_layer, True][0], bias[rows]))
                    if matrix.shape[1]:
                        parts.append((places[pseudo_layer, linear_layer, False][0], matrix[rows]))
            if params.projection is not None:
                parts.append((places[pseudo_layer, 2 * gates, False][0], params.projection))
        return parts

    def _vector(self, rnn: int, space: int, space_bytes: int) -> NDArray[Any]:
        values = self._values(rnn, "RNNDescriptor")
        assert space_bytes == self._space(rnn)[1]
        memory = _memory(space, (space_bytes // values["dtype"].itemsize,), values["dtype"])
        assert np.isfinite(memory).all(), "what is between the parameters is zeroed"
        vector = np.empty(values["network"].num_params, values["dtype"])
        for start, part in self._parts(rnn, vector):
            part[...] = memory[start : start + part.size].reshape(part.shape)
        return vector


def _memory(address: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    buffer = (ctypes.c_uint8 * num_bytes).from_address(address)
    return np.frombuffer(memoryview(buffer), np.uint8).view(dtype).reshape(shape)
