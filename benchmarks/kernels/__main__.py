"""`python -m benchmarks.kernels`: the time of the host's kernels without parts of their tool chain, beside the whole.

Each kernel is compiled once as it is, and once for each part that can be replaced by what `njit(parallel=True)` has.
All are then measured in alternation, in many short groups of calls, so that other work affects all alike.
There are two figures of each: the median of the least times of the groups, and the median of all times, which shows
what happens when others use the processors. A ratio above 1 says how much longer a kernel takes without the part.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

import numba
import numpy as np
from numba.core.registry import cpu_target

from benchmarks.kernels import plain
from gradserve_protocol.memory.pool import BufferPool
from gradserve_server.devices.device import CpuDevice
from gradserve_server.devices.host import activations, intrinsics, reduction
from gradserve_server.devices.host.kernels import ForkJoin
from gradserve_server.devices.host.reduction import Reducer
from gradserve_server.ops.activation import cpu as activation
from gradserve_server.ops.batch_norm import cpu as batch_norm
from gradserve_server.ops.batch_norm import spec as batch_norm_spec
from gradserve_server.ops.layer_norm import cpu as layer_norm
from gradserve_server.ops.layer_norm import spec as layer_norm_spec
from gradserve_server.tensors.spec import BFLOAT16, FLOAT16, FLOAT32

RESULTS = Path(__file__).with_name("results.json")
_HOST, _OPS = "gradserve_server.devices.host", "gradserve_server.ops"
_COMPILED = (
    *(f"{_HOST}.{name}" for name in ("intrinsics", "lanes", "activations", "moments", "reduction_loops")),
    *(f"{_OPS}.batch_norm.{name}" for name in ("cpu_sums", "cpu_loops")),
    f"{_OPS}.layer_norm.cpu_loops",
    f"{_OPS}.activation.cpu_loops",
)
"""The modules that Numba compiles; each way to compile has its own copies of them."""

PARTS = {
    "load and store": "array[index], with arithmetic on the bits of 16-bit floats",
    "lanes": "sums of blocks in scalar loops, in float64",
    "functions": "np.exp and np.tanh",
    "threads": "the threads of njit(parallel=True)",
}
"""The parts of the tool chain, and what takes their place."""


def _with_changes(module: ModuleType, **changes: Any) -> ModuleType:
    changed = ModuleType(module.__name__)
    vars(changed).update(vars(module) | changes)
    return changed


@contextmanager
def _compiling(without: set[str]) -> Iterator[None]:
    """Makes kernels that are compiled in the block do without some parts."""
    kept = {name: sys.modules.pop(name) for name in _COMPILED if name in sys.modules}
    own: dict[str, Any] = {}
    if "load and store" in without:
        own = {"load": plain.load, "read": plain.load, "store": plain.store, "write": plain.store}
        own["store_at"] = plain.store_at
    if own:
        sys.modules[f"{_HOST}.intrinsics"] = _with_changes(intrinsics, **own)
    if "functions" in without:
        functions = {"sigmoid": plain.sigmoid, "hyperbolic_tangent": plain.hyperbolic_tangent}
        sys.modules[f"{_HOST}.activations"] = _with_changes(activations, **functions)
    loaded = {name: importlib.import_module(name) for name in _COMPILED}
    if "lanes" in without:
        vars(loaded[f"{_HOST}.moments"])["_differences_of_block"] = plain.differences_of_block
        vars(loaded[f"{_OPS}.batch_norm.cpu_loops"])["_plain_products"] = plain.products_of_block
        vars(loaded[f"{_OPS}.layer_norm.cpu_loops"])["_sums_of_block"] = plain.sums_of_block
    # Numba takes functions with equal code for the same, whatever their modules are.
    cpu_target.target_context.cached_internal_func.clear()
    with tempfile.TemporaryDirectory() as cache:
        config: Any = numba.config
        before, config.CACHE_DIR = config.CACHE_DIR, cache
        try:
            yield
        finally:
            config.CACHE_DIR = before
            for name in _COMPILED:
                sys.modules.pop(name, None)
            sys.modules.update(kept)


def _few(table: Any, *dtypes: Any) -> Any:
    return replace(table, types={dtype: table.types[dtype] for dtype in dtypes})


_PAUSE_SECONDS = 0.02
_POOL = BufferPool(1 << 30)


@functools.cache
def _numbers(shape: tuple[int, ...], dtype: Any, seed: int) -> Any:
    return np.random.default_rng(seed).standard_normal(shape, np.float32).astype(dtype)


def cases(parallel: Any) -> dict[str, Callable[[], object]]:
    """Compiles the kernels; returns calls of them by name."""
    taken: Counter[Any] = Counter()

    def numbers(*shape: int, dtype: Any = FLOAT32) -> Any:
        # All ways get the same arrays: other memory is not equally fast.
        taken[shape, dtype] += 1
        return _numbers(shape, dtype, taken[shape, dtype])

    device = CpuDevice(_POOL)
    calls: dict[str, Callable[[], object]] = {}
    reduction.REDUCTION = _few(reduction.REDUCTION, FLOAT32, BFLOAT16, FLOAT16)
    reducer = Reducer(parallel)
    reducer.prepare(lambda: False)
    for dtype in (FLOAT32, BFLOAT16, FLOAT16):
        total, source, out = (numbers(1 << 22, dtype=each) for each in (FLOAT32, dtype, dtype))
        calls[f"sum += {dtype} * factor, 4 Mi"] = partial(reducer.add_scaled, [total], [source], 0.5)
        calls[f"{dtype} = sum / divisor, 4 Mi"] = partial(reducer.divide, [total], 3.0, [out])
    total, source = numbers(1 << 18), numbers(1 << 18)
    calls["sum += float32 * factor, 256 Ki"] = partial(reducer.add_scaled, [total], [source], 0.5)

    batch_norm.FUSED_BATCH_NORM = _few(batch_norm.FUSED_BATCH_NORM, FLOAT32, BFLOAT16)
    normalizer = batch_norm.CpuBatchNorm(device, parallel)
    normalizer.prepare(lambda: False)
    vector = [np.abs(numbers(256)) + 1 for _ in range(4)]
    for dtype in (FLOAT32, BFLOAT16):
        for data_format, shape in (("NHWC", (32, 14, 14, 256)), ("NCHW", (32, 256, 14, 14))):
            x, dy = numbers(*shape, dtype=dtype), numbers(*shape, dtype=dtype)
            inputs = batch_norm_spec.ForwardInputs(x, *vector)
            attributes = batch_norm_spec.ForwardAttributes(data_format=data_format)
            geometry = batch_norm_spec.plan_forward(inputs, attributes).geometry
            given = batch_norm_spec.GradInputs(dy, x, *vector[:3])
            of_grad = batch_norm_spec.GradAttributes(data_format=data_format)
            name = f"{dtype} {data_format} {list(shape)}"
            calls[f"FusedBatchNorm {name}"] = partial(normalizer.forward, inputs, attributes, geometry)
            calls[f"FusedBatchNormGrad {name}"] = partial(normalizer.gradient, given, of_grad, geometry)

    layer_norm.LAYER_NORM = _few(layer_norm.LAYER_NORM, FLOAT32, BFLOAT16)
    of_layers = layer_norm.CpuLayerNorm(device, parallel)
    of_layers.prepare(lambda: False)
    for dtype in (FLOAT32, BFLOAT16):
        x, dy = numbers(2048, 1024, dtype=dtype), numbers(2048, 1024, dtype=dtype)
        ln_inputs = layer_norm_spec.ForwardInputs(x, numbers(1024), numbers(1024))
        ln_attributes = layer_norm_spec.ForwardAttributes()
        plan = layer_norm_spec.LAYER_NORM.plan(ln_inputs, ln_attributes)
        results = of_layers.forward(ln_inputs, ln_attributes, plan.geometry)
        ln_given = layer_norm_spec.GradInputs(dy, x, ln_inputs.scale, results.mean, results.rstd)
        calls[f"LayerNorm {dtype} [2048, 1024]"] = partial(of_layers.forward, ln_inputs, ln_attributes, plan.geometry)
        calls[f"LayerNormGrad {dtype} [2048, 1024]"] = partial(of_layers.gradient, ln_given, plan.geometry)

    functions = activation.CpuActivation(parallel)
    functions.prepare(lambda: False)
    x, result = numbers(1 << 21), numbers(1 << 21)
    for name in ("tanh", "sigmoid"):
        calls[f"{name} float32, 2 Mi"] = partial(functions.forward, name, x, result)
    return calls


def _seconds(call: Callable[[], object], repeats: int) -> list[float]:
    # OpenMP's threads spin for some milliseconds after each loop; they must not disturb others.
    time.sleep(_PAUSE_SECONDS)
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return found


def main() -> None:
    """Measures and prints all figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels")
    parser.add_argument("--threads", type=int, default=min(2, len(os.sched_getaffinity(0))))
    parser.add_argument("--groups", type=int, default=9, help="the groups whose least times are taken")
    parser.add_argument("--repeats", type=int, default=5, help="the calls of a group")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name}")
    arguments = parser.parse_args()
    numba.set_num_threads(arguments.threads)
    ways: dict[str, set[str]] = {"whole": set(), **{part: {part} for part in PARTS}, "all of them": set(PARTS)}
    compiled = {}
    for way, without in ways.items():
        print(f"compiling, without {', '.join(sorted(without)) or 'nothing'}", file=sys.stderr, flush=True)
        threads = plain.NumbaThreads if "threads" in without else ForkJoin
        with _compiling(without):
            compiled[way] = cases(threads(arguments.threads))
            for call in compiled[way].values():
                call()
    found: dict[str, dict[str, list[float]]] = {}
    print(f"{'milliseconds, and ratios without':50}", *(f"{way:>15}" for way in ways))
    for name in compiled["whole"]:
        groups: dict[str, list[list[float]]] = {way: [] for way in ways}
        for _ in range(arguments.groups):
            for way in ways:
                groups[way].append(_seconds(compiled[way][name], arguments.repeats))
        least = {way: statistics.median(map(min, each)) for way, each in groups.items()}
        median = {way: statistics.median(chain.from_iterable(each)) for way, each in groups.items()}
        whole, usual = least.pop("whole"), median.pop("whole")
        found[name] = {"milliseconds": [round(whole * 1e3, 3), round(usual * 1e3, 3)]}
        found[name] |= {way: [round(least[way] / whole, 2), round(median[way] / usual, 2)] for way in least}
        print(f"{name:50}", *(f"{first:8.2f} {second:6.2f}" for first, second in found[name].values()), flush=True)
    if arguments.write:
        machine = {"processor": _processor(), "threads": arguments.threads, "numba": numba.__version__}
        RESULTS.write_text(json.dumps({"machine": machine, "without": PARTS, "ratios": found}, indent=1) + "\n")


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


if __name__ == "__main__":
    main()
