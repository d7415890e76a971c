"""The families that compute layers on a device."""

from collections.abc import Mapping
from typing import Any, cast

import numpy as np

from gradserve_server.devices.device import CpuDevice, Device
from gradserve_server.layers.batch_norm.computation import LayerComputation
from gradserve_server.layers.batch_norm.declaration import FAMILY as BATCH_NORM_LAYER
from gradserve_server.ops.activation.spec import FAMILY as ACTIVATION
from gradserve_server.ops.activation.spec import Activation
from gradserve_server.ops.batch_norm.spec import FAMILY as BATCH_NORM
from gradserve_server.ops.batch_norm.spec import BatchNorm
from gradserve_server.ops.operation import Family


def make_layer_families(device: Device, ops: Mapping[str, Family]) -> Mapping[str, Family]:
    """Returns the families of layers on a device, by name; `ops` are its families of ops."""
    xp: Any = np
    if not isinstance(device, CpuDevice):
        import cupy

        xp = cupy
    batch_norm, activation = cast(BatchNorm, ops[BATCH_NORM]), cast(Activation, ops[ACTIVATION])
    return {BATCH_NORM_LAYER: LayerComputation(device, xp, batch_norm, activation)}
