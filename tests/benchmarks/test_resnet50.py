from __future__ import annotations

import math

from benchmarks.workloads.resnet50 import parameter_shapes


def test_resnet50_has_its_tensors() -> None:
    shapes = parameter_shapes()
    assert len(shapes) == 161
    assert sum(math.prod(shape) for shape in shapes.values()) == 25_557_032
    assert next(iter(shapes)) == "conv1.weight"
    assert shapes["layer1.0.downsample.0.weight"] == (256, 64, 1, 1)
    assert shapes["layer3.5.conv2.weight"] == (256, 256, 3, 3)
    assert shapes["layer4.0.conv1.weight"] == (512, 1024, 1, 1)
    assert shapes["fc.weight"] == (1000, 2048)
