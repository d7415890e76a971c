"""What FusedBatchNorm and FusedBatchNormGrad refuse, in TensorFlow's words and order, and what they take."""

import re
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from gradserve_server.errors import InvalidArgumentError
from gradserve_server.ops.batch_norm.spec import (
    ForwardAttributes,
    ForwardInputs,
    Geometry,
    GradAttributes,
    GradInputs,
    Plan,
    plan_forward,
    plan_gradient,
)
from tests.golden.fused_batch_norm_errors import Refusal, load_refusals
from tests.together import together

FROZEN_CHANNELS_FIRST = (
    "The implementation of FusedBatchNormGrad with is_training=False only support NHWC tensor format for now."
)


def zeros(*shape: int, dtype: Any = np.float32) -> NDArray[Any]:
    return np.zeros(shape, dtype)


FIVE = zeros(5)
FORWARD = ForwardInputs(x=zeros(2, 3, 4, 5), scale=FIVE, offset=FIVE, mean=FIVE, variance=FIVE)
GRADIENT = GradInputs(zeros(2, 3, 4, 5), zeros(2, 3, 4, 5), scale=FIVE, reserve_space_1=FIVE, reserve_space_2=FIVE)


def refusal_of(inputs: ForwardInputs | GradInputs, attributes: Any) -> InvalidArgumentError:
    with pytest.raises(InvalidArgumentError) as raised:
        plan(inputs, attributes)
    return raised.value


def plan(inputs: ForwardInputs | GradInputs, attributes: Any) -> Plan:
    return plan_forward(inputs, attributes) if isinstance(inputs, ForwardInputs) else plan_gradient(inputs, attributes)


def forward_refusal(field: str, message: str, **changes: Any) -> Any:
    return _refusal(FORWARD, ForwardAttributes(is_training=False), field, message, changes)


def gradient_refusal(field: str, message: str, **changes: Any) -> Any:
    return _refusal(GRADIENT, GradAttributes(), field, message, changes)


def _refusal(inputs: Any, attributes: Any, field: str, message: str, changes: dict[str, Any]) -> Any:
    mine = {name: value for name, value in changes.items() if name in type(inputs).__dataclass_fields__}
    rest = {name: value for name, value in changes.items() if name not in mine}
    called = ", ".join(f"{n}={getattr(v, 'shape', v)} {getattr(v, 'dtype', '')}".strip() for n, v in changes.items())
    return pytest.param(replace(inputs, **mine), replace(attributes, **rest), field, message, id=f"{field}: {called}")


NOT_IN_LIST = "is not in the list of allowed values:"
FORMATS = '"NHWC", "NCHW", "NDHWC", "NCDHW"'
TYPES = "half, bfloat16, float, double"
COUNT = "must have the same number of elements as the channels of x, got"
DOUBLE, INT = np.float64, np.int64
HALVES, DOUBLES, INTS = zeros(5, dtype=np.float16), zeros(5, dtype=DOUBLE), zeros(5, dtype=INT)
DOUBLE_IMAGES, INT_IMAGES = zeros(2, 3, 4, 5, dtype=DOUBLE), zeros(2, 3, 4, 5, dtype=INT)

REFUSED = [
    forward_refusal(
        "data_format", f"Value for attr 'data_format' of \"CHWN\" {NOT_IN_LIST} {FORMATS}", data_format="CHWN"
    ),
    forward_refusal("data_format", f"Value for attr 'data_format' of \"\" {NOT_IN_LIST} {FORMATS}", data_format=""),
    forward_refusal("x", f"Value for attr 'T' of int64 {NOT_IN_LIST} {TYPES}", x=INT_IMAGES),
    forward_refusal("scale", f"Value for attr 'U' of double {NOT_IN_LIST} float; got it for scale", scale=DOUBLES),
    forward_refusal("scale", f"Value for attr 'U' of half {NOT_IN_LIST} float; got it for scale", scale=HALVES),
    forward_refusal("offset", f"Value for attr 'U' of int64 {NOT_IN_LIST} float; got it for offset", offset=INTS),
    forward_refusal("mean", f"Value for attr 'U' of double {NOT_IN_LIST} float; got it for mean", mean=DOUBLES),
    forward_refusal(
        "variance", f"Value for attr 'U' of half {NOT_IN_LIST} float; got it for variance", variance=HALVES
    ),
    forward_refusal("scale", f"Value for attr 'U' of float {NOT_IN_LIST} double; got it for scale", x=DOUBLE_IMAGES),
    forward_refusal("x", "input must be 4 or 5-dimensional[4,5]", x=zeros(4, 5)),
    forward_refusal("x", "input must be 4 or 5-dimensional[]", x=zeros()),
    forward_refusal("x", "input must be 4 or 5-dimensional[1,1,1,1,1,5]", x=zeros(1, 1, 1, 1, 1, 5)),
    forward_refusal("scale", "scale must be 1-dimensional[]", scale=zeros()),
    forward_refusal("offset", "offset must be 1-dimensional[5,1]", offset=zeros(5, 1)),
    forward_refusal("mean", "estimated_mean must be 1-dimensional[]", mean=zeros()),
    forward_refusal("variance", "estimated_variance must be 1-dimensional[0,5]", variance=zeros(0, 5)),
    forward_refusal("mean", "estimated_mean must be 1-dimensional[]", mean=zeros(), is_training=True),
    forward_refusal("scale", f"scale {COUNT} 4 and 5", scale=zeros(4)),
    forward_refusal("offset", f"offset {COUNT} 0 and 5", offset=zeros(0)),
    forward_refusal("mean", f"When is_training=false, mean {COUNT} 0 and 5", mean=zeros(0)),
    forward_refusal("variance", f"When is_training=false, variance {COUNT} 6 and 5", variance=zeros(6)),
    forward_refusal(
        "mean",
        f"When exponential_avg_factor != 1, mean {COUNT} 0 and 5",
        mean=zeros(0),
        is_training=True,
        exponential_avg_factor=0.5,
    ),
    forward_refusal(
        "variance",
        f"When exponential_avg_factor != 1, variance {COUNT} 1 and 5",
        variance=zeros(1),
        is_training=True,
        exponential_avg_factor=0.0,
    ),
    forward_refusal("scale", f"scale {COUNT} 5 and 3", data_format="NCHW"),
    gradient_refusal(
        "data_format", f"Value for attr 'data_format' of \"nhwc\" {NOT_IN_LIST} {FORMATS}", data_format="nhwc"
    ),
    gradient_refusal("y_backprop", f"Value for attr 'T' of int64 {NOT_IN_LIST} {TYPES}", y_backprop=INT_IMAGES),
    gradient_refusal("x", "x must have the dtype of y_backprop, float, got double", x=DOUBLE_IMAGES),
    gradient_refusal("scale", f"Value for attr 'U' of half {NOT_IN_LIST} float; got it for scale", scale=HALVES),
    gradient_refusal(
        "reserve_space_1",
        f"Value for attr 'U' of double {NOT_IN_LIST} float; got it for reserve_space_1",
        reserve_space_1=DOUBLES,
    ),
    gradient_refusal(
        "reserve_space_2",
        f"Value for attr 'U' of int64 {NOT_IN_LIST} float; got it for reserve_space_2",
        reserve_space_2=INTS,
    ),
    gradient_refusal("y_backprop", "input must be 4 or 5-dimensional[5]", y_backprop=zeros(5)),
    gradient_refusal("x", "input must be 4 or 5-dimensional[5]", x=zeros(5)),
    gradient_refusal("scale", "scale must be 1-dimensional[]", scale=zeros()),
    gradient_refusal("reserve_space_1", "saved mean must be 1-dimensional[5,1]", reserve_space_1=zeros(5, 1)),
    gradient_refusal("reserve_space_2", "saved variance must be 1-dimensional[]", reserve_space_2=zeros()),
    gradient_refusal(
        "y_backprop",
        "x and y_backprop must have same shape, but x has shape [2,3,4,5] and y_backprop has shape [2,3,4,6]",
        y_backprop=zeros(2, 3, 4, 6),
    ),
    gradient_refusal("scale", f"scale {COUNT} 1 and 5", scale=zeros(1)),
    gradient_refusal("reserve_space_1", f"reserve_space_1 {COUNT} 0 and 5", reserve_space_1=zeros(0)),
    gradient_refusal(
        "reserve_space_2", f"reserve_space_2 {COUNT} 6 and 5", reserve_space_2=zeros(6), is_training=False
    ),
]


@pytest.mark.parametrize(("inputs", "attributes", "field", "message"), REFUSED)
def test_refused(inputs: ForwardInputs | GradInputs, attributes: Any, field: str, message: str) -> None:
    error = refusal_of(inputs, attributes)
    assert (error.field, error.message) == (field, message)


@pytest.mark.parametrize(
    ("data_format", "shape", "rank"),
    [
        ("NHWC", (1, 2, 3, 4, 5), 4),
        ("NCHW", (1, 5, 2, 3, 4), 4),
        ("NDHWC", (2, 3, 4, 5), 5),
        ("NCDHW", (2, 5, 3, 4), 5),
    ],
)
def test_rank_is_that_of_the_format(data_format: str, shape: tuple[int, ...], rank: int) -> None:
    """TensorFlow refuses it in graphs only; its kernels go on."""
    x = zeros(*shape)
    message = f"Shape must be rank {rank} but is rank {len(shape)} for x {list(shape)} in data_format {data_format}"
    for inputs, attributes in (
        (replace(FORWARD, x=x), ForwardAttributes(data_format=data_format)),
        (replace(GRADIENT, x=x, y_backprop=x), GradAttributes(data_format=data_format)),
    ):
        error = refusal_of(inputs, attributes)
        assert (error.field, error.message) == ("x", message.replace(", ", ",").replace("],", "],"))


class TestBesideTensorFlow:
    REFUSALS = load_refusals()

    @together("refusal", [refusal for refusal in REFUSALS if refusal.text != FROZEN_CHANNELS_FIRST])
    def test_same_error(self, refusal: Refusal) -> None:
        error = refusal_of(refusal.inputs, refusal.attributes)
        if mismatch := re.fullmatch(r"cannot compute \w+ as input #(\d+)\(zero-based\) was .*", refusal.text):
            # TensorFlow numbers the input whose dtype is not that of others; messages here name it.
            assert error.field == list(refusal.arrays)[int(mismatch[1])]
            return
        expected = refusal.text.replace("half, bfloat16, float", TYPES).replace(
            "values: bfloat16, float", "values: float"
        )
        assert error.message.partition("; got it for")[0] == expected

    def test_frozen_gradient_of_channels_first_is_taken(self) -> None:
        """The only thing TensorFlow's ops refuse that these take."""
        (refusal,) = (refusal for refusal in self.REFUSALS if refusal.text == FROZEN_CHANNELS_FIRST)
        assert plan(refusal.inputs, refusal.attributes).geometry == Geometry(2, 5, 12)


class TestTaken:
    @pytest.mark.parametrize(
        ("data_format", "shape", "geometry"),
        [
            ("NHWC", (2, 3, 4, 5), Geometry(24, 5, 1)),
            ("NCHW", (2, 5, 3, 4), Geometry(2, 5, 12)),
            ("NDHWC", (2, 3, 4, 6, 5), Geometry(144, 5, 1)),
            ("NCDHW", (2, 5, 3, 4, 6), Geometry(2, 5, 72)),
            ("NHWC", (0, 3, 4, 5), Geometry(0, 5, 1)),
            ("NCHW", (2, 5, 0, 4), Geometry(2, 5, 0)),
        ],
    )
    @pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
    def test_dtypes_and_formats(
        self, dtype: type, data_format: str, shape: tuple[int, ...], geometry: Geometry
    ) -> None:
        param_dtype = np.dtype(np.float64 if dtype is np.float64 else np.float32)
        x, five = zeros(*shape, dtype=dtype), zeros(5, dtype=param_dtype)
        image, channels = (np.dtype(dtype), shape), (param_dtype, (5,))
        forward = plan_forward(ForwardInputs(x, five, five, five, five), ForwardAttributes(data_format=data_format))
        assert forward.geometry == geometry
        assert [(s.dtype, s.shape) for s in forward.output_specs] == [image, *[channels] * 4, (param_dtype, ())]
        gradient = plan_gradient(GradInputs(x, x, five, five, five), GradAttributes(data_format=data_format))
        assert gradient.geometry == geometry
        nothing = (param_dtype, (0,))
        assert [(s.dtype, s.shape) for s in gradient.output_specs] == [image, channels, channels, nothing, nothing]

    @pytest.mark.parametrize("length", [0, 1, 5, 7])
    def test_moments_that_are_not_read_are_of_any_length(self, length: int) -> None:
        inputs = replace(FORWARD, mean=zeros(length), variance=zeros(7 - length))
        assert plan_forward(inputs, ForwardAttributes()).geometry.channels == 5

    @pytest.mark.parametrize("reserve_space_3", [None, zeros(), zeros(0), zeros(3, 4, dtype=np.int8)])
    def test_reserve_space_3_is_not_looked_at(self, reserve_space_3: NDArray[Any] | None) -> None:
        inputs = replace(GRADIENT, reserve_space_3=reserve_space_3)
        assert plan_gradient(inputs, GradAttributes()).geometry.channels == 5

    def test_no_channels(self) -> None:
        none = zeros(0)
        inputs = ForwardInputs(zeros(2, 3, 4, 0), none, none, none, none)
        assert plan_forward(inputs, ForwardAttributes(is_training=False)).geometry == Geometry(24, 0, 1)

    @pytest.mark.parametrize("epsilon", [0.0, -1.0, float("inf")])
    @pytest.mark.parametrize("factor", [-1.0, 0.0, 2.0])
    def test_epsilon_and_factor_are_any_numbers(self, epsilon: float, factor: float) -> None:
        assert plan_forward(FORWARD, ForwardAttributes(epsilon, factor)).geometry.count == 24
