"""FusedBatchNorm and its gradient, in TensorFlow's three versions.

The server knows the newest version; the older ones are views of it that take less and return less.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from gradserve.calls.exchange import Operation
from gradserve.calls.op_wire import as_op_input, run_op, without_output
from gradserve.calls.tensorflow_text import check_attribute, check_text_attribute, dtype_text
from gradserve.op_outputs import (
    FusedBatchNormGradOutputs,
    FusedBatchNormGradV3Outputs,
    FusedBatchNormOutputs,
    FusedBatchNormV3Outputs,
)
from gradserve.results import Tensor, TensorHandle, TensorLike
from gradserve.v1 import fused_batch_norm_messages_pb2 as messages_pb2
from gradserve.wire.dtypes import DType
from gradserve.wire.payload import Array

_FLOAT32, _FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)

_Inputs = Mapping[str, Array | TensorHandle]


class BatchNormCalls:
    """FusedBatchNorm and its gradient."""

    def FusedBatchNorm(
        self,
        *,
        x: TensorLike,
        scale: TensorLike,
        offset: TensorLike,
        mean: TensorLike,
        variance: TensorLike,
        epsilon: float = 0.0001,
        exponential_avg_factor: float = 1,
        data_format: str = "NHWC",
        is_training: bool = True,
        keep: bool = False,
        lease: float | None = None,
    ) -> Operation[FusedBatchNormOutputs[Tensor]]:
        """Normalises a batch of images: FusedBatchNormV3 for float32 and the data formats NHWC and NCHW.

        Args:
            x: float32, of rank 4.
            data_format: "NHWC" or "NCHW".
        """
        inputs = _inputs(x, scale=scale, offset=offset, mean=mean, variance=variance)
        _check_dtype_v1(inputs["x"])
        _check_format_v1(data_format)
        attributes = _forward_attributes(epsilon, exponential_avg_factor, data_format, is_training)
        return (yield from _older_forward(inputs, attributes, keep, lease))

    def FusedBatchNormV2(
        self,
        *,
        x: TensorLike,
        scale: TensorLike,
        offset: TensorLike,
        mean: TensorLike,
        variance: TensorLike,
        epsilon: float = 0.0001,
        exponential_avg_factor: float = 1,
        data_format: str = "NHWC",
        is_training: bool = True,
        keep: bool = False,
        lease: float | None = None,
    ) -> Operation[FusedBatchNormOutputs[Tensor]]:
        """Normalises a batch of images: FusedBatchNormV3 for the data formats NHWC and NCHW.

        Args:
            x: float16, bfloat16, float32 or float64, of rank 4.
            data_format: "NHWC" or "NCHW".
        """
        inputs = _inputs(x, scale=scale, offset=offset, mean=mean, variance=variance)
        _check_format_v1(data_format)
        attributes = _forward_attributes(epsilon, exponential_avg_factor, data_format, is_training)
        return (yield from _older_forward(inputs, attributes, keep, lease))

    def FusedBatchNormV3(
        self,
        *,
        x: TensorLike,
        scale: TensorLike,
        offset: TensorLike,
        mean: TensorLike,
        variance: TensorLike,
        epsilon: float = 0.0001,
        exponential_avg_factor: float = 1,
        data_format: str = "NHWC",
        is_training: bool = True,
        keep: bool = False,
        lease: float | None = None,
    ) -> Operation[FusedBatchNormV3Outputs[Tensor]]:
        """Normalises a batch of images or volumes over all axes but the channels.

        In the following, C is the number of channels, M the number of elements of one, T the dtype of x, and U
        float32, or float64 when T is.

        Args:
            x: float16, bfloat16, float32 or float64, of rank 4, or 5 for the formats with a D.
            scale: U, shape [C].
            offset: U, shape [C].
            mean: U, shape [C]: the population mean, or in training the moving mean. Not read, and of any length
                (such as 0), in training with an exponential_avg_factor of 1.
            variance: As `mean`, of the variance.
            epsilon: Added to the variance.
            exponential_avg_factor: f: what the moments of x count in batch_mean and batch_variance, in training.
            data_format: "NHWC", "NCHW", "NDHWC" or "NCDHW".
            is_training: Normalise by the moments of x, or by `mean` and `variance`.
            keep: Leave the outputs on the server and return their handles.
            lease: For how many seconds they live there without use; None for the server's default.

        Returns:
            y: T, the shape of x.
            batch_mean: U, shape [C]: in training (1 - f) mean + f mu, with mu the mean of x; else `mean`.
            batch_variance: U, shape [C]: in training (1 - f) variance + f var M / max(M - 1, 1), with var the
                population variance of x; else `variance`.
            reserve_space_1: U, shape [C]: in training mu, else 0.
            reserve_space_2: U, shape [C]: in training var, else 0.
            reserve_space_3: U, a scalar: 0.

        Raises:
            InvalidArgumentError: An argument does not fit; its `field` says which.
            NotFoundError: A handle does not exist (any more).
            ResourceExhaustedError: The outputs do not fit into the server's memory.
        """
        inputs = _inputs(x, scale=scale, offset=offset, mean=mean, variance=variance)
        attributes = _forward_attributes(epsilon, exponential_avg_factor, data_format, is_training)
        return FusedBatchNormV3Outputs(**(yield from _forward(inputs, attributes, keep, lease)))

    def FusedBatchNormGrad(
        self,
        *,
        y_backprop: TensorLike,
        x: TensorLike,
        scale: TensorLike,
        reserve_space_1: TensorLike,
        reserve_space_2: TensorLike,
        epsilon: float = 0.0001,
        data_format: str = "NHWC",
        is_training: bool = True,
        keep: bool = False,
        lease: float | None = None,
    ) -> Operation[FusedBatchNormGradOutputs[Tensor]]:
        """Gradients of FusedBatchNorm: FusedBatchNormGradV3 for float32 and the data formats NHWC and NCHW.

        Args:
            x: float32, of rank 4.

        Returns:
            reserve_space_3: U, shape [0]: a placeholder.
            reserve_space_4: U, shape [0]: a placeholder.
        """
        inputs = _grad_inputs(y_backprop, x, scale, reserve_space_1, reserve_space_2)
        _check_dtype_v1(inputs["x"])
        _check_format_v1(data_format)
        attributes = _grad_attributes(epsilon, data_format, is_training)
        # The placeholders had other numbers before reserve_space_3 became an input.
        return FusedBatchNormGradOutputs(*(yield from _gradient(inputs, attributes, keep, lease)).values())

    def FusedBatchNormGradV2(
        self,
        *,
        y_backprop: TensorLike,
        x: TensorLike,
        scale: TensorLike,
        reserve_space_1: TensorLike,
        reserve_space_2: TensorLike,
        epsilon: float = 0.0001,
        data_format: str = "NHWC",
        is_training: bool = True,
        keep: bool = False,
        lease: float | None = None,
    ) -> Operation[FusedBatchNormGradOutputs[Tensor]]:
        """Gradients of FusedBatchNormV2: FusedBatchNormGradV3 for the data formats NHWC and NCHW.

        Args:
            x: float16, bfloat16, float32 or float64, of rank 4.

        Returns:
            reserve_space_3: U, shape [0]: a placeholder.
            reserve_space_4: U, shape [0]: a placeholder.
        """
        inputs = _grad_inputs(y_backprop, x, scale, reserve_space_1, reserve_space_2)
        _check_format_v1(data_format)
        attributes = _grad_attributes(epsilon, data_format, is_training)
        # The placeholders had other numbers before reserve_space_3 became an input.
        return FusedBatchNormGradOutputs(*(yield from _gradient(inputs, attributes, keep, lease)).values())

    def FusedBatchNormGradV3(
        self,
        *,
        y_backprop: TensorLike,
        x: TensorLike,
        scale: TensorLike,
        reserve_space_1: TensorLike,
        reserve_space_2: TensorLike,
        reserve_space_3: TensorLike | None = None,
        epsilon: float = 0.0001,
        data_format: str = "NHWC",
        is_training: bool = True,
        keep: bool = False,
        lease: float | None = None,
    ) -> Operation[FusedBatchNormGradV3Outputs[Tensor]]:
        """Gradients of FusedBatchNormV3 with respect to x, scale and offset.

        C, T and U are those of `FusedBatchNormV3`.

        Args:
            y_backprop: T, the shape of x: the gradient with respect to y.
            x: float16, bfloat16, float32 or float64, of rank 4, or 5 for the formats with a D.
            scale: U, shape [C].
            reserve_space_1: U, shape [C]: that of the forward call in training, else the input `mean` of it.
            reserve_space_2: U, shape [C]: that of the forward call in training, else the input `variance` of it.
            reserve_space_3: That of the forward call; not read.
            epsilon: As in the forward call.
            data_format: As in the forward call.
            is_training: As in the forward call.
            keep: Leave the outputs on the server and return their handles.
            lease: For how many seconds they live there without use; None for the server's default.

        Returns:
            x_backprop: T, the shape of x.
            scale_backprop: U, shape [C].
            offset_backprop: U, shape [C].
            reserve_space_4: U, shape [0]: a placeholder.
            reserve_space_5: U, shape [0]: a placeholder.

        Raises:
            InvalidArgumentError: An argument does not fit; its `field` says which.
            NotFoundError: A handle does not exist (any more).
            ResourceExhaustedError: The outputs do not fit into the server's memory.
        """
        inputs = _grad_inputs(y_backprop, x, scale, reserve_space_1, reserve_space_2)
        if reserve_space_3 is not None:
            inputs = {
                **inputs,
                "reserve_space_3": as_op_input(reserve_space_3, _param_dtype(inputs["x"]), "reserve_space_3"),
            }
        attributes = _grad_attributes(epsilon, data_format, is_training)
        return FusedBatchNormGradV3Outputs(**(yield from _gradient(inputs, attributes, keep, lease)))


def _inputs(x: TensorLike, **params: TensorLike) -> _Inputs:
    images = as_op_input(x, _FLOAT32, "x")
    param_dtype = _param_dtype(images)
    return {"x": images} | {name: as_op_input(value, param_dtype, name) for name, value in params.items()}


def _grad_inputs(
    y_backprop: TensorLike, x: TensorLike, scale: TensorLike, reserve_space_1: TensorLike, reserve_space_2: TensorLike
) -> _Inputs:
    inputs = _inputs(x, scale=scale, reserve_space_1=reserve_space_1, reserve_space_2=reserve_space_2)
    return {"y_backprop": as_op_input(y_backprop, inputs["x"].dtype, "y_backprop"), **inputs}


def _param_dtype(x: Array | TensorHandle) -> DType:
    return _FLOAT64 if x.dtype == _FLOAT64 else _FLOAT32


def _forward_attributes(
    epsilon: float, exponential_avg_factor: float, data_format: str, is_training: bool
) -> Mapping[str, Any]:
    attributes = _grad_attributes(epsilon, data_format, is_training)
    return {**attributes, "exponential_avg_factor": exponential_avg_factor}


def _grad_attributes(epsilon: float, data_format: str, is_training: bool) -> Mapping[str, Any]:
    return {"epsilon": epsilon, "data_format": data_format, "is_training": is_training}


def _forward(
    inputs: _Inputs, attributes: Mapping[str, Any], keep: bool, lease: float | None
) -> Operation[dict[str, Any]]:
    return run_op("FusedBatchNorm", messages_pb2.FusedBatchNormRequest, inputs, attributes, keep=keep, lease=lease)


def _older_forward(
    inputs: _Inputs, attributes: Mapping[str, Any], keep: bool, lease: float | None
) -> Operation[FusedBatchNormOutputs[Tensor]]:
    outputs = yield from _forward(inputs, attributes, keep, lease)
    return FusedBatchNormOutputs(**(yield from without_output(outputs, "reserve_space_3")))


def _gradient(
    inputs: _Inputs, attributes: Mapping[str, Any], keep: bool, lease: float | None
) -> Operation[dict[str, Any]]:
    return run_op(
        "FusedBatchNormGrad", messages_pb2.FusedBatchNormGradRequest, inputs, attributes, keep=keep, lease=lease
    )


def _check_dtype_v1(x: Array | TensorHandle) -> None:
    check_attribute(dtype_text(x.dtype), "T", ["float"], field="x")


def _check_format_v1(data_format: str) -> None:
    check_text_attribute(data_format, "data_format", ("NHWC", "NCHW"))
