"""The data that a forward pass on the host saves for the backward pass, and its place in memory."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradserve_server.ops.cudnn_rnn.network import Mode, Network
from gradserve_server.ops.cudnn_rnn.spec import Problem


@dataclass(frozen=True)
class SavedDirection:
    """The data that the forward call saves for one pseudo-layer. Floats are in the dtype of the computation.

    Attributes:
        gates: [T, B, G, H]; None in networks without gates.
        cells: [T + 1, B, H], for lstm: c, and the initial state as an additional step, the first one for direction 0
            and the last one for direction 1.
        candidates: [T, B, H], for gru: R_n h_(t-1) + bR_n.
        unprojected: [T, B, H]: with a projection, the output before it.
        kept: bool, [T, B, columns]: the elements of the layer's input that dropout keeps; None without dropout.
    """

    gates: NDArray[Any] | None = None
    cells: NDArray[Any] | None = None
    candidates: NDArray[Any] | None = None
    unprojected: NDArray[Any] | None = None
    kept: NDArray[np.bool_] | None = None


@dataclass(frozen=True)
class SavedLayer:
    """The data that the forward call saves for one layer.

    Attributes:
        outputs: [T + 2, B, D * H'], between the initial states of direction 0 and those of direction 1.
        directions: The data of one or two directions.
    """

    outputs: NDArray[Any]
    directions: tuple[SavedDirection, ...]


def layer_bytes(problem: Problem, layer: int) -> int:
    """Returns the memory for a layer, with padding that aligns the next one."""
    sizes = [math.prod(shape) * dtype.itemsize for _, shape, dtype in _fields(problem, layer)]
    return _aligned(problem, sum(sizes))


def all_layers_bytes(problem: Problem) -> int:
    """Returns the memory for all layers together."""
    return sum(layer_bytes(problem, layer) for layer in range(problem.network.num_layers))


def saved_layer(problem: Problem, layer: int, memory: NDArray[np.uint8]) -> SavedLayer:
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


def all_saved_layers(problem: Problem, memory: NDArray[np.uint8]) -> list[SavedLayer]:
    """Returns all layers, one after another in their memory of `all_layers_bytes`."""
    layers = []
    position = 0
    for layer in range(problem.network.num_layers):
        end = position + layer_bytes(problem, layer)
        layers.append(saved_layer(problem, layer, memory[position:end]))
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
