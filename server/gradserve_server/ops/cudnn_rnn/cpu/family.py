"""CudnnRNN and CudnnRNNBackprop on the host."""

import hashlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradserve_server.devices.compute import checkpoint
from gradserve_server.devices.device import CpuDevice
from gradserve_server.devices.host.kernels import ForkJoin, PreparedKernels
from gradserve_server.ops.cudnn_rnn.cpu.cells import CUDNN_RNN, LSTM_SCANS, KernelCells, NumpyCells
from gradserve_server.ops.cudnn_rnn.cpu.pseudo_layer import (
    Cells,
    Geometry,
    PseudoLayer,
    SavedDirection,
    SavedLayer,
    States,
)
from gradserve_server.ops.cudnn_rnn.declaration import check_lengths
from gradserve_server.ops.cudnn_rnn.reserve import TAG_BYTES, TAG_START, ReserveKey, check_tag, reserve_length
from gradserve_server.ops.cudnn_rnn.spec import (
    HEADER_BYTES,
    BackpropInputs,
    BackpropOutputs,
    ForwardInputs,
    ForwardOutputs,
    Mode,
    Network,
    Problem,
    PseudoLayerParams,
    split_params,
)

_PIECE_BYTES = 1 << 26
_AES_KEY_BYTES = 32
_NONCE_BYTES = 12


class CpuCudnnRnn:
    """CudnnRNN by BLAS for products and kernels for the rest of a step, or NumPy if the kernels are not ready."""

    def __init__(self, device: CpuDevice, parallel: ForkJoin, reserve_key: ReserveKey) -> None:
        """Computes with NumPy until `prepare` has compiled the kernels.

        Args:
            device: The host.
            parallel: The threads to compute with, beside which BLAS should have only one; see `Products`.
            reserve_key: Authenticates reserve spaces.
        """
        self._device = device
        self._parallel = parallel
        self._reserve_key = reserve_key
        self._kernels = PreparedKernels(CUDNN_RNN, loader=parallel.loader)
        self._lstm_scans = PreparedKernels(LSTM_SCANS, loader=parallel.loader)

    def prepare(self, stop: Callable[[], bool]) -> None:
        """Compiles all kernels, or loads them from a cache; ends early, between two kernels, once `stop()`."""
        self._kernels.prepare(stop)
        self._lstm_scans.prepare(stop)

    def forward(self, inputs: ForwardInputs, problem: Problem) -> ForwardOutputs:
        """Computes CudnnRNN.

        Raises:
            InvalidArgumentError: A sequence length is not from 1 to T.
        """
        lengths = _lengths(inputs.sequence_lengths, problem)
        with np.errstate(all="ignore"):
            return self._call(problem, lengths).forward(inputs, self._reserve_key)

    def backprop(self, inputs: BackpropInputs, problem: Problem) -> BackpropOutputs:
        """Computes CudnnRNNBackprop.

        Raises:
            InvalidArgumentError: reserve_space or host_reserved are not from a forward call for this problem on this
                device, or not from the same one; or a sequence length is not from 1 to T.
        """
        lengths = _lengths(inputs.sequence_lengths, problem)
        memory = _checked_reserve(self._reserve_key, self._device.name, inputs, problem, lengths)
        with np.errstate(all="ignore"):
            return self._call(problem, lengths).backprop(inputs, memory)

    def _call(self, problem: Problem, lengths: NDArray[np.int64]) -> "_Call":
        dtype = problem.compute_dtype
        kernels, lstm_scans = self._kernels.get(dtype), self._lstm_scans.get(dtype)
        cells: Cells = NumpyCells()
        if kernels is not None and lstm_scans is not None:
            cells = KernelCells(kernels, lstm_scans, self._parallel)
        return _Call(self._device, self._parallel, cells, problem, lengths)


class _Call:
    """A call of one of the ops. Its arrays have time first, and floats in the dtype of the computation."""

    def __init__(
        self, device: CpuDevice, parallel: ForkJoin, cells: Cells, problem: Problem, lengths: NDArray[np.int64]
    ) -> None:
        self._device = device
        self._parallel = parallel
        self._cells = cells
        self._problem = problem
        self._network = problem.network
        self._lengths = lengths
        self._is_valid = (np.arange(problem.max_seq_length)[:, None] < lengths)[:, :, None]
        self._has_ends = bool((lengths < problem.max_seq_length).any())

    def forward(self, inputs: ForwardInputs, reserve_key: ReserveKey) -> ForwardOutputs:
        problem, network = self._problem, self._network
        params = split_params(network, self._compute_form(inputs.params))
        initial = self._states(inputs.input_h, inputs.input_c)
        masks = dropout_masks(problem)
        reserve_space, host_reserved = np.zeros((), problem.dtype), np.zeros((), np.int8)
        layers: list[SavedLayer] | None = None
        if problem.is_training:
            reserve_space, host_reserved, layers = self._new_reserve(reserve_key)
        x = self._input(inputs.input)
        last = []
        for layer in range(network.num_layers):
            saved = layers[layer] if layers else self._scratch_layer(layer)
            self._clear(saved)
            for index in range(network.num_directions):
                number, direction = layer * network.num_directions + index, saved.directions[index]
                dropped = x
                if direction.kept is not None:
                    mask = masks[number - network.num_directions]
                    np.not_equal(mask, 0, out=direction.kept)
                    dropped = np.multiply(x, mask, out=self._device.empty(x.shape, x.dtype))
                pseudo_layer = self._pseudo_layer(index, params[number])
                last.append(pseudo_layer.forward(dropped, initial[number], direction, saved.outputs, self._is_valid))
            x = saved.outputs[1:-1]
        output = self._device.empty(problem.sequence_shape(x.shape[2]), problem.dtype)
        self._time_first(output)[...] = x
        self._clear_ends(output)
        output_h, output_c = self._stack(last)
        if problem.is_training:
            memory = reserve_space.view(np.uint8)
            tag = content_tag(reserve_key.content_key(host_reserved), memory[HEADER_BYTES:])
            memory[TAG_START:HEADER_BYTES] = host_reserved.view(np.uint8)[TAG_START:] = np.frombuffer(tag, np.uint8)
        return ForwardOutputs(output, output_h, output_c, reserve_space, host_reserved)

    def backprop(self, inputs: BackpropInputs, memory: NDArray[np.uint8]) -> BackpropOutputs:
        problem, network = self._problem, self._network
        params = split_params(network, self._compute_form(inputs.params))
        params_backprop = self._device.empty((network.num_params,), problem.compute_dtype)
        d_params = split_params(network, params_backprop)
        d_last = self._states(inputs.output_h_backprop, inputs.output_c_backprop)
        d_outputs = self._compute_form(self._time_first(inputs.output_backprop))
        layers = _all_saved_layers(problem, memory)
        d_initial: list[States] = []
        for layer in reversed(range(network.num_layers)):
            saved = layers[layer]
            x = layers[layer - 1].outputs[1:-1] if layer else self._input(inputs.input)
            d_x: NDArray[Any] | None = None
            for index in reversed(range(network.num_directions)):
                number, direction = layer * network.num_directions + index, saved.directions[index]
                d_direction, d_states = self._pseudo_layer(index, params[number]).backward(
                    self._drop(x, direction.kept), direction, saved.outputs, d_outputs, d_last[number], d_params[number]
                )
                if direction.kept is not None:
                    self._drop(d_direction, direction.kept, out=d_direction)
                d_x = d_direction if d_x is None else np.add(d_x, d_direction, out=d_x)
                d_initial.insert(0, d_states)
            assert d_x is not None
            d_outputs = d_x
        input_h_backprop, input_c_backprop = self._stack(d_initial)
        return BackpropOutputs(
            input_backprop=self._input_backprop(d_outputs),
            input_h_backprop=input_h_backprop,
            input_c_backprop=input_c_backprop,
            params_backprop=self._given_dtype(params_backprop),
        )

    def _pseudo_layer(self, direction: int, params: PseudoLayerParams) -> PseudoLayer:
        geometry = Geometry(
            mode=self._network.mode,
            units=self._network.num_units,
            steps=self._problem.max_seq_length,
            lengths=self._lengths,
            reverse=direction == 1,
            offset=direction * self._network.hidden_size,
        )
        return PseudoLayer(self._device, self._parallel, self._cells, geometry, params)

    def _new_reserve(self, reserve_key: ReserveKey) -> tuple[NDArray[Any], NDArray[np.int8], list[SavedLayer]]:
        """Returns reserve_space and host_reserved without their tags, and the layers in the memory of reserve_space."""
        problem = self._problem
        num_bytes = _all_layers_bytes(problem)
        reserve_space = self._device.empty((reserve_length(problem, num_bytes),), problem.dtype)
        header = reserve_key.new_header(self._device.name, problem, self._lengths)
        memory = reserve_space.view(np.uint8)
        memory[:HEADER_BYTES] = header.view(np.uint8)
        memory[HEADER_BYTES + num_bytes :] = 0
        return reserve_space, header, _all_saved_layers(problem, memory[HEADER_BYTES:])

    def _scratch_layer(self, layer: int) -> SavedLayer:
        memory = self._device.empty((_layer_bytes(self._problem, layer),), np.dtype(np.uint8))
        return _saved_layer(self._problem, layer, memory)

    def _clear(self, saved: SavedLayer) -> None:
        """Clears bytes that are not written: clients see reserve_space, and memory may hold data of another call."""
        saved.outputs[0], saved.outputs[-1] = 0, 0
        if self._has_ends:
            saved.outputs[...] = 0
            for direction in saved.directions:
                for array in (direction.cells, direction.candidates, direction.unprojected):
                    if array is not None:
                        array[...] = 0

    def _input(self, given: NDArray[Any]) -> NDArray[Any]:
        """Returns the input of the first layer. Values beyond the end of a sequence have no effect, not even NaN."""
        x = self._compute_form(self._time_first(given))
        return np.where(self._is_valid, x, 0) if self._has_ends else x

    def _input_backprop(self, d_x: NDArray[Any]) -> NDArray[Any]:
        if self._problem.time_major:
            result = self._given_dtype(d_x)
        else:
            result = self._device.empty(self._problem.sequence_shape(d_x.shape[2]), self._problem.dtype)
            self._time_first(result)[...] = d_x
        self._clear_ends(result)
        return result

    def _clear_ends(self, sequences: NDArray[Any]) -> None:
        if self._has_ends:
            np.copyto(self._time_first(sequences), 0, where=~self._is_valid)

    def _drop(self, x: NDArray[Any], kept: NDArray[np.bool_] | None, out: NDArray[Any] | None = None) -> NDArray[Any]:
        if kept is None:
            return x
        if out is None:
            out = self._device.empty(x.shape, x.dtype)
        np.multiply(x, kept, out=out)
        out *= x.dtype.type(1 / (1 - self._problem.dropout))
        return out

    def _states(self, h: NDArray[Any], c: NDArray[Any] | None) -> list[States]:
        all_h = self._compute_form(self._time_first(h))
        if c is None or self._network.mode is not Mode.LSTM:
            return [States(each, None) for each in all_h]
        return [States(*both) for both in zip(all_h, self._compute_form(self._time_first(c)), strict=True)]

    def _stack(self, states: list[States]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Returns h and c as the op returns them."""
        axis = 0 if self._problem.time_major else 1
        all_h = np.stack([each.h for each in states], axis).astype(self._problem.dtype)
        all_c = [each.c for each in states if each.c is not None]
        if not all_c:
            return all_h, np.zeros((), self._problem.dtype)
        return all_h, np.stack(all_c, axis).astype(self._problem.dtype)

    def _time_first(self, array: NDArray[Any]) -> NDArray[Any]:
        """Returns an array with time, or the pseudo-layer, as the first axis."""
        return array if self._problem.time_major else array.swapaxes(0, 1)

    def _compute_form(self, array: NDArray[Any]) -> NDArray[Any]:
        """Returns an array in the dtype of the computation: the array itself if possible, otherwise a copy."""
        dtype = self._problem.compute_dtype
        if array.dtype == dtype and array.flags.c_contiguous and array.flags.aligned:
            return array
        copy = self._device.empty(array.shape, dtype)
        copy[...] = array
        return copy

    def _given_dtype(self, array: NDArray[Any]) -> NDArray[Any]:
        if array.dtype == self._problem.dtype:
            return array
        copy = self._device.empty(array.shape, self._problem.dtype)
        copy[...] = array
        return copy


def dropout_masks(problem: Problem) -> tuple[NDArray[Any], ...]:
    """Returns the factors of the inputs of all layers but the first.

    They come from NumPy's counter-based Philox generator with the seed as its key, one after another: for each
    pseudo-layer in turn, whichever dimension of the input comes first. (On a GPU, cuDNN draws other numbers for the
    same seed.)

    Returns:
        For each pseudo-layer of the layers >= 1 an array in the dtype of the computation, [T, B, D * H']: 0 for dropped
        elements, 1 / (1 - dropout) for others. Empty without dropout.
    """
    if not problem.dropout:
        return ()
    network = problem.network
    random = np.random.Generator(np.random.Philox(key=problem.seed))
    shape = (problem.max_seq_length, problem.batch, network.layer_input_size(1))
    kept = problem.compute_dtype.type(1 / (1 - problem.dropout))
    return tuple(
        np.where(random.random(shape, np.float32) < problem.dropout, kept.dtype.type(0), kept)
        for _ in range(network.num_pseudo_layers - network.num_directions)
    )


def content_tag(key: bytes, content: NDArray[np.uint8]) -> bytes:
    """Returns the tag of a content, which is contiguous.

    It is a hash of the tags of AES-GCM (GMAC, NIST SP 800-38D) for each piece of the content. Processors have
    instructions for that, so it takes a tenth of the time of a cryptographic hash. It releases the GIL.

    Args:
        key: 64 bytes, which authenticate one content only.
        content: The bytes to authenticate.
    """
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # few servers need it, and it takes a while

    cipher = AESGCM(key[:_AES_KEY_BYTES])
    tags = hashlib.blake2b(key=key[_AES_KEY_BYTES:], digest_size=TAG_BYTES)
    for number, start in enumerate(range(0, len(content), _PIECE_BYTES)):
        checkpoint()
        piece: Any = content[start : start + _PIECE_BYTES]  # whose type does not say that it is a buffer
        tags.update(cipher.encrypt(number.to_bytes(_NONCE_BYTES, "little"), b"", piece))
    return tags.digest()


def _lengths(given: NDArray[np.int32] | None, problem: Problem) -> NDArray[np.int64]:
    """Returns the length of each sequence.

    Raises:
        InvalidArgumentError: A length is not from 1 to T.
    """
    steps = problem.max_seq_length
    if given is None:
        return np.full(problem.batch, steps, np.int64)
    lengths = given.astype(np.int64)
    check_lengths(lengths, problem)
    return lengths


def _checked_reserve(
    reserve_key: ReserveKey, device: str, inputs: BackpropInputs, problem: Problem, lengths: NDArray[np.int64]
) -> NDArray[np.uint8]:
    """Returns the part of reserve_space after the header, aligned.

    Raises:
        InvalidArgumentError: It, or host_reserved, is not as a forward call in this run of the server returned it.
    """
    given: NDArray[Any] = inputs.reserve_space
    header = given.reshape(-1).view(np.uint8)[:HEADER_BYTES]
    num_bytes = _all_layers_bytes(problem)
    reserve_key.check_header(device, problem, lengths, num_bytes, given, header, inputs.host_reserved)
    memory = given.view(np.uint8)[HEADER_BYTES:]
    check_tag(header, content_tag(reserve_key.content_key(header), memory))
    return memory.copy() if memory.ctypes.data % problem.compute_dtype.itemsize else memory


def _layer_bytes(problem: Problem, layer: int) -> int:
    """Returns the memory for a layer, with padding that aligns the next one."""
    sizes = [math.prod(shape) * dtype.itemsize for _, shape, dtype in _fields(problem, layer)]
    return _aligned(problem, sum(sizes))


def _all_layers_bytes(problem: Problem) -> int:
    """Returns the memory for all layers together."""
    return sum(_layer_bytes(problem, layer) for layer in range(problem.network.num_layers))


def _saved_layer(problem: Problem, layer: int, memory: NDArray[np.uint8]) -> SavedLayer:
    """Returns a layer in its memory of `layer_bytes`."""
    position = 0
    outputs = None
    directions: list[dict[str, NDArray[Any]]] = [{} for _ in range(problem.network.num_directions)]
    for (direction, name), shape, dtype in _fields(problem, layer):
        end = position + math.prod(shape) * dtype.itemsize
        array = memory[position:end].view(dtype).reshape(shape)
        position = end
        if name == "outputs":
            outputs = array
        else:
            directions[direction][name] = array
    assert outputs is not None
    return SavedLayer(outputs, tuple(SavedDirection(**arrays) for arrays in directions))


def _all_saved_layers(problem: Problem, memory: NDArray[np.uint8]) -> list[SavedLayer]:
    """Returns all layers, one after another in their memory of `all_layers_bytes`."""
    layers = []
    position = 0
    for layer in range(problem.network.num_layers):
        end = position + _layer_bytes(problem, layer)
        layers.append(_saved_layer(problem, layer, memory[position:end]))
        position = end
    return layers


def _fields(problem: Problem, layer: int) -> Iterator[tuple[tuple[int, str], tuple[int, ...], np.dtype[Any]]]:
    """Yields the direction and name, shape and dtype of each array: bytes last, so that floats stay aligned."""
    network, steps, batch = problem.network, problem.max_seq_length, problem.batch
    directions = range(network.num_directions)
    width = network.num_directions * network.hidden_size
    yield (0, "outputs"), (steps + 2, batch, width), problem.compute_dtype
    for direction in directions:
        for name, shape in _float_shapes(network, steps, batch).items():
            yield (direction, name), shape, problem.compute_dtype
    if layer and problem.dropout:
        for direction in directions:
            yield (direction, "kept"), (steps, batch, width), np.dtype(np.bool_)


def _float_shapes(network: Network, steps: int, batch: int) -> dict[str, tuple[int, ...]]:
    units = network.num_units
    if network.mode is Mode.GRU:
        return {"gates": (steps, batch, 3, units), "candidates": (steps, batch, units)}
    if network.mode is not Mode.LSTM:
        return {}
    unprojected = {"unprojected": (steps, batch, units)} if network.num_proj else {}
    return {"gates": (steps, batch, 4, units), "cells": (steps + 1, batch, units), **unprojected}


def _aligned(problem: Problem, num_bytes: int) -> int:
    size = problem.compute_dtype.itemsize
    return -(-num_bytes // size) * size
