"""A process that computes with kernels for the processor that Numba is told of, and checks the results.

python -m tests.processors.compute [--small] [--lanes N]

With --small it leaves out FusedBatchNorm and LayerNorm. With --lanes LLVM makes vectors of N float32, and these two,
whose sums could depend on that, are all that is computed. Prints a digest of what they gave.
"""

import argparse
import hashlib
import sys
from dataclasses import replace
from typing import Any

import llvmlite.binding as llvm
import numpy as np

from gradserve_protocol.codecs import CODECS
from gradserve_protocol.memory.pool import BufferPool
from gradserve_server.accumulators.gradient import Packed
from gradserve_server.devices.device import CpuDevice
from gradserve_server.devices.host.kernels import ForkJoin, PreparedKernels, flat
from gradserve_server.ops.activation.cpu import IN_FLOAT32, CpuActivation
from gradserve_server.ops.batch_norm.cpu import FUSED_BATCH_NORM, CpuBatchNorm
from gradserve_server.ops.gru.cpu import CONVERSIONS
from gradserve_server.ops.layer_norm.cpu import LAYER_NORM, LONG_GROUPS, CpuLayerNorm
from gradserve_server.parameters.optimizers.stepping import OPTIMIZER_STEPS, Stepper
from gradserve_server.parameters.unpacking.adder import PACKED_SUMS, Addition, PackedAdder
from gradserve_server.tensors.spec import BFLOAT16, FLOAT16, FLOAT32
from tests.ops.activation.cases import assert_forward, values
from tests.ops.batch_norm import accuracy as batch_norm_accuracy
from tests.ops.layer_norm import accuracy as layer_norm_accuracy
from tests.parameters.optimizers.steps import OPTIMIZERS, assert_same_steps, component, copied, step_by_element

HARD = ("noise", "outlier first", "signs that alternate", "a level that changes", "all the same")


def digest_of_norms() -> str:
    """Checks sums of what is hard to add up; returns a digest of all results."""
    batch_norm = CpuBatchNorm(CpuDevice(BufferPool(1 << 26)), ForkJoin(1))
    batch_norm._kernels = PreparedKernels(replace(FUSED_BATCH_NORM, types={FLOAT32: FUSED_BATCH_NORM.types[FLOAT32]}))
    batch_norm.prepare(lambda: False)
    assert batch_norm._kernels.get(FLOAT32) is not None
    layer_norm = CpuLayerNorm(CpuDevice(BufferPool(1 << 26)), ForkJoin(1))
    layer_norm._kernels = PreparedKernels(replace(LAYER_NORM, types={FLOAT32: LAYER_NORM.types[FLOAT32]}))
    layer_norm._part_kernels = PreparedKernels(replace(LONG_GROUPS, types={FLOAT32: LONG_GROUPS.types[FLOAT32]}))
    layer_norm.prepare(lambda: False)
    assert layer_norm._kernels.get(FLOAT32) is not None
    assert layer_norm._part_kernels.get(FLOAT32) is not None
    digest = hashlib.sha256()
    for name in HARD:
        for data_format in ("NHWC", "NCHW"):
            digest.update(batch_norm_accuracy.assert_sums_within_bounds(batch_norm, FLOAT32, data_format, name))
        digest.update(layer_norm_accuracy.assert_sums_within_bounds(layer_norm, name))
    return digest.hexdigest()


def check_conversions() -> None:
    """Checks every float16, and float32 of all magnitudes and about all halves between two float16."""
    numbers = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    with np.errstate(all="ignore"):
        factors = 1 + np.array([0, 2.0**-12, -(2.0**-12), 2.0**-11, -(2.0**-11), 2.0**-11 + 2.0**-20])
        near = (numbers[:, None] * factors).astype(np.float32).reshape(-1)
    random = np.random.default_rng(0).integers(0, 1 << 32, 1 << 20, np.uint32).view(np.float32)
    alone, chunk = ForkJoin(1), 1 << 14
    for dtype in (FLOAT16, BFLOAT16):
        kernels = CONVERSIONS.compile(dtype, lambda: False)
        assert kernels is not None
        wide = np.empty_like(numbers)
        bits = np.arange(1 << 16, dtype=np.uint16)
        kernels.run(alone, kernels.to_float32, (flat(bits.view(dtype)), chunk, wide), 1)
        _assert_same(wide, bits.view(dtype).astype(np.float32))
        given = np.concatenate((near, random))
        narrow = np.empty(given.size, dtype)
        kernels.run(alone, kernels.from_float32, (given, chunk, flat(narrow)), 1)
        with np.errstate(all="ignore"):
            _assert_same(narrow, given.astype(dtype))


def check_activations() -> None:
    """Checks functions of every kind, in float32 and 16 bits."""
    family = CpuActivation(ForkJoin(1))
    family._kernels = PreparedKernels(IN_FLOAT32)
    family.prepare(lambda: False)
    assert family._kernels.get(FLOAT32) is not None
    for dtype in (FLOAT32, FLOAT16, BFLOAT16):
        for name in ("relu", "tanh", "softplus", "gelu"):
            x = values(dtype)
            out = np.empty_like(x)
            family.forward(name, x, out)
            assert_forward(name, x, out)


def packed_adder() -> PackedAdder:
    """Returns an adder with kernels for float32."""
    adder = PackedAdder(ForkJoin(1))
    adder._kernels = PreparedKernels(replace(PACKED_SUMS, types={FLOAT32: PACKED_SUMS.types[FLOAT32]}))
    return adder


def check_packed_sums() -> None:
    """Checks that packed updates are added with the bits of NumPy, at scales of all magnitudes."""
    adder = packed_adder()
    adder.prepare(lambda: False)
    assert adder._kernels.get(FLOAT32) is not None
    random = np.random.default_rng(0)
    scales: Any = 2.0 ** random.integers(-30, 13, (1 << 11, 1)).astype(np.float64)
    numbers = (random.normal(size=(1 << 11, 32)) * scales).astype(np.float32)
    for codec in CODECS.values():
        packed = Packed(codec, codec.encode(numbers), numbers.shape)
        for is_first in (True, False):
            total = random.normal(size=numbers.shape).astype(np.float32)
            added = codec.decode(packed.data, numbers.size).reshape(numbers.shape) * np.float32(0.3)
            expected = added if is_first else total + added
            adder.add([Addition(packed, total, is_first)], 0.3)
            _assert_same(total, expected)


def check_optimizers() -> None:
    """Checks that steps have the bits of NumPy, which rounds every operation by itself on every processor."""
    stepper = Stepper(ForkJoin(1))
    stepper.packed = packed_adder()
    stepper._kernels = PreparedKernels(replace(OPTIMIZER_STEPS, types={FLOAT32: OPTIMIZER_STEPS.types[FLOAT32]}))
    stepper.prepare(lambda: False)
    assert stepper._kernels.get(FLOAT32) is not None
    for optimizer in OPTIMIZERS.values():
        for update in (FLOAT32, FLOAT16, BFLOAT16):
            steps = [component(optimizer, (1 << 12,), seed, update=update, master=FLOAT32) for seed in range(3)]
            expected = copied(steps)
            step_by_element(optimizer, 0.5, expected)
            stepper.step(optimizer, 0.5, steps)
            assert_same_steps(steps, expected)


def _assert_same(found: Any, expected: Any) -> None:
    is_nan = np.isnan(expected.astype(np.float32))
    assert np.array_equal(np.isnan(found.astype(np.float32)), is_nan)
    kind = np.dtype(f"u{found.dtype.itemsize}")
    assert np.array_equal(found[~is_nan].view(kind), expected[~is_nan].view(kind))


if __name__ == "__main__":
    options = argparse.ArgumentParser()
    options.add_argument("--small", action="store_true")
    options.add_argument("--lanes", type=int)
    given = options.parse_args()
    if given.lanes is None:
        check_conversions()
        check_activations()
        check_packed_sums()
        check_optimizers()
    else:
        llvm.set_option("", f"-force-vector-width={given.lanes}")
    if not given.small:
        sys.stdout.write(digest_of_norms())
