"""Records what PyTorch's RNN, LSTM and GRU compute on the CPU: writes cudnn_rnn.npz beside this file.

Their cells, gates and biases are those of cuDNN. TensorFlow has CudnnRNN on GPUs only.

Runs in an environment of its own, which `make golden` makes so:

    python3 -m venv .venv-golden-rnn
    .venv-golden-rnn/bin/pip install torch==2.13.0 numpy==2.4.6 ml_dtypes==0.6.0
    .venv-golden-rnn/bin/python -m tests.golden.make_cudnn_rnn
"""

import itertools
import json
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.golden.seeded_inputs import cudnn_rnn_inputs

Arrays = dict[str, NDArray[Any]]

STEPS, BATCH, INPUT_SIZE, UNITS, PROJECTION = 5, 3, 4, 6, 3
LENGTHS = (3, 5, 1)
GATES = {"rnn_relu": 1, "rnn_tanh": 1, "lstm": 4, "gru": 3}


@dataclass(frozen=True)
class Network:
    """A network, and the sequences it is applied to."""

    rnn_mode: str
    num_directions: int
    num_layers: int
    num_proj: int
    skip_input: bool
    lengths: tuple[int, ...] | None

    @property
    def name(self) -> str:
        parts = [
            self.rnn_mode,
            ("unidirectional", "bidirectional")[self.num_directions - 1],
            f"{self.num_layers}_layers",
        ]
        parts += ["projection"] * bool(self.num_proj) + ["skip_input"] * self.skip_input
        return "-".join([*parts, "lengths" if self.lengths else "full"])

    @property
    def input_size(self) -> int:
        return UNITS if self.skip_input else INPUT_SIZE

    @property
    def hidden_size(self) -> int:
        return self.num_proj or UNITS

    @property
    def suffixes(self) -> list[str]:
        """What ends the names of the parameters of each pseudo-layer."""
        directions = ("", "_reverse")[: self.num_directions]
        return [f"l{layer}{direction}" for layer in range(self.num_layers) for direction in directions]

    def shapes(self, num_params: int) -> dict[str, tuple[int, ...]]:
        """Of all inputs; those for lstm alone are drawn last."""
        count = self.num_layers * self.num_directions
        hidden, cell = (count, BATCH, self.hidden_size), (count, BATCH, UNITS)
        return {
            "input": (STEPS, BATCH, self.input_size),
            "input_h": hidden,
            "params": (num_params,),
            "output_backprop": (STEPS, BATCH, self.num_directions * self.hidden_size),
            "output_h_backprop": hidden,
        } | ({"input_c": cell, "output_c_backprop": cell} if self.rnn_mode == "lstm" else {})

    def module(self, dtype: torch.dtype) -> torch.nn.RNNBase:
        options: dict[str, Any] = {
            "num_layers": self.num_layers,
            "bidirectional": self.num_directions == 2,
            "dtype": dtype,
        }
        if self.rnn_mode == "lstm":
            return torch.nn.LSTM(self.input_size, UNITS, proj_size=self.num_proj, **options)
        if self.rnn_mode == "gru":
            return torch.nn.GRU(self.input_size, UNITS, **options)
        return torch.nn.RNN(self.input_size, UNITS, nonlinearity=self.rnn_mode.removeprefix("rnn_"), **options)

    def parameters(self, module: torch.nn.RNNBase) -> list[torch.nn.Parameter]:
        """In the order of cuDNN's vector: all matrices, then all biases."""
        matrices = ["weight_ih", "weight_hh"] + ["weight_hr"] * bool(self.num_proj)
        names = [f"{kind}_{suffix}" for suffix in self.suffixes for kind in matrices]
        names += [f"{kind}_{suffix}" for suffix in self.suffixes for kind in ("bias_ih", "bias_hh")]
        left_out = [name for name in names if self.skip_input and name.startswith("weight_ih_l0")]
        return [getattr(module, name) for name in names if name not in left_out]

    def set_parameters(self, module: torch.nn.RNNBase, values: NDArray[Any]) -> None:
        position = 0
        with torch.no_grad():
            for parameter in self.parameters(module):
                count = parameter.numel()
                parameter.copy_(torch.from_numpy(values[position : position + count]).reshape(parameter.shape))
                position += count
            if self.skip_input:
                for suffix in self.suffixes[: self.num_directions]:
                    getattr(module, f"weight_ih_{suffix}").copy_(torch.eye(UNITS).repeat(GATES[self.rnn_mode], 1))


def networks() -> Iterator[Network]:
    modes = [(mode, 0, False) for mode in GATES] + [("lstm", PROJECTION, False)]
    for (mode, num_proj, skip), directions, layers, lengths in itertools.product(
        modes, (1, 2), (1, 3), (None, LENGTHS)
    ):
        yield Network(mode, directions, layers, num_proj, skip, lengths)
    for mode, directions in itertools.product(GATES, (1, 2)):
        yield Network(mode, directions, 2, 0, True, None)
    yield Network("lstm", 2, 2, PROJECTION, True, LENGTHS)


def run(network: Network, drawn: Arrays, dtype: torch.dtype) -> Arrays:
    """Returns all outputs of the forward and the backward op."""
    tensors = {name: torch.tensor(array, dtype=dtype) for name, array in drawn.items()}
    module = network.module(dtype)
    network.set_parameters(module, tensors["params"].numpy())
    names = [name for name in ("input", "input_h", "input_c") if name in tensors]
    x, *states = (tensors[name].requires_grad_() for name in names)
    state = tuple(states) if network.rnn_mode == "lstm" else states[0]
    if network.lengths:
        packed = pack_padded_sequence(x, torch.tensor(network.lengths), enforce_sorted=False)
        packed_output, last = module(packed, state)
        output, _ = pad_packed_sequence(packed_output, total_length=STEPS)
    else:
        output, last = module(x, state)
    last_states = last if network.rnn_mode == "lstm" else (last,)
    outputs = {"output": output} | dict(zip(("output_h", "output_c"), last_states, strict=False))
    torch.autograd.backward(list(outputs.values()), [tensors[f"{name}_backprop"] for name in outputs])
    gradients = {f"{name}_backprop": tensors[name].grad for name in names}
    gradients["params_backprop"] = torch.cat([p.grad.ravel() for p in network.parameters(module)])
    return {name: tensor.detach().numpy() for name, tensor in (outputs | gradients).items()}


def main() -> None:
    torch.set_num_threads(1)
    cases: list[dict[str, Any]] = []
    numbers: dict[str, list[NDArray[Any]]] = {"float32": [], "float64": []}
    for index, network in enumerate(networks()):
        num_params = sum(parameter.numel() for parameter in network.parameters(network.module(torch.float64)))
        seed, shapes = 1997 + index, network.shapes(num_params)
        drawn = cudnn_rnn_inputs(seed, shapes)
        crc32 = zlib.crc32(b"".join(array.tobytes() for array in drawn.values()))
        for dtype, arrays in numbers.items():
            outputs = run(network, drawn, getattr(torch, dtype))
            arrays += [array.ravel() for array in outputs.values()]
        output_shapes = {name: array.shape for name, array in outputs.items()}
        about = {"name": network.name, "seed": seed, "shapes": shapes, "inputs_crc32": crc32, "outputs": output_shapes}
        cases.append(about | asdict(network) | {"num_units": UNITS})
    manifest = json.dumps({"torch": torch.__version__, "numpy": np.__version__, "cases": cases})
    path = Path(__file__).with_name("cudnn_rnn.npz")
    stored: dict[str, Any] = {dtype: np.concatenate(arrays) for dtype, arrays in numbers.items()}
    np.savez_compressed(path, manifest=manifest, **stored)


if __name__ == "__main__":
    main()
