"""The batch_norm layer with the kernels of a GPU, which run on the CPU, and with arrays as strict as CuPy's."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from gradserve_server.layers.batch_norm.computation import FAMILY, LayerComputation
from gradserve_server.ops.activation.cuda import CudaActivation
from gradserve_server.ops.activation.spec import gradient_of_result
from gradserve_server.ops.batch_norm.cuda import CudaBatchNorm
from gradserve_server.tensors.spec import FLOATING
from tests.devices.cuda.emulation.strict_device import StrictDevice
from tests.golden.batch_norm_layer import LayerCase, load_layer_cases
from tests.layers.bench import LayerBench
from tests.layers.recorded import check_recorded

SEED = 20201121
UPDATES = 2


def representative() -> Iterator[LayerCase]:
    """Yields one case of every combination of implementation, dtype, layout and kind."""
    seen = set()
    for case in load_layer_cases():
        arguments, first, activation = case.arguments, case.steps[0], case.arguments.get("activation_fn")
        adjustment = first.adjustment
        kind = (
            case.implementation,
            case.dtype,
            arguments.get("data_format"),
            case.is_training,
            None if first.batch_weights is None else (first.batch_weights.dtype, first.batch_weights.any()),
            None if adjustment is None else tuple(size == 1 for size in adjustment[0].shape),
            arguments.get("updates_collections", ""),
            *(bool(arguments.get(name)) for name in ("renorm", "renorm_clipping", "zero_debias_moving_mean")),
            *(arguments.get(name) for name in ("center", "scale")),
            activation and gradient_of_result(activation),
            str(arguments.get("param_regularizers")),
        )
        if kind not in seen:
            seen.add(kind)
            yield case


def computation_on(device: StrictDevice) -> LayerComputation:
    return LayerComputation(device, device.xp, CudaBatchNorm(device), CudaActivation(device))


@pytest.mark.parametrize("case", list(representative()), ids=str)
def test_it_is_tensorflows(compiled: Path, case: LayerCase) -> None:
    device = StrictDevice(compiled, SEED)
    families = {FAMILY: computation_on(device)}
    check_recorded(case, lambda: LayerBench(device=device, families=families), UPDATES)
    device.emulated.check_margins()


def test_preparing_computes_in_every_dtype(compiled: Path) -> None:
    device = StrictDevice(compiled)
    computation_on(device).prepare(lambda: False)
    gradients = {name for name in device.emulated.launched if name.startswith("gradient")}
    assert {dtype for dtype in FLOATING if any(f"_{dtype.name}" in name for name in gradients)} == set(FLOATING)


def test_preparing_ends_when_told(compiled: Path) -> None:
    device, checks = StrictDevice(compiled), iter([False, True])
    computation_on(device).prepare(lambda: next(checks))
    assert next(checks, None) is None
    assert device.emulated.launched
