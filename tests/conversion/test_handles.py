"""A tensor on the server is as good as the array that it was made of."""

import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gradserve
from gradserve_protocol.v1 import accumulator_messages_pb2 as messages_pb2
from gradserve_protocol.v1 import accumulator_pb2, tensor_pb2
from tests.bad_input.requests import Apply, Create, Take, component, dense, ref, sparse, spec, tensor
from tests.servers.raw_calls import RawCalls

FLOATS = ["float16", "bfloat16", "float32", "float64"]
VALUES = [1.0, -2.5, 1 / 3, 1e-9, 60000.0]


def as_dtype(name: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("given", [*FLOATS, "int32", "uint8", "bool"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_handle_counts_as_its_array(client: gradserve.Client, dtype: str, given: str, deterministic: bool) -> None:
    array = np.abs(VALUES).astype(as_dtype(given))
    handle = client.put(array)
    totals = []
    for gradient in (array, handle):
        model = client.gradient_accumulator({"w": gradserve.DenseSpec(dtype)}, deterministic=deterministic)
        for worker in "ab":
            model.apply_grad({"w": gradient}, worker_id=worker, weight=0.3)
        totals.append(model.take_grad(2)["w"])
    assert totals[0].dtype == as_dtype(dtype)
    assert totals[0].tobytes() == totals[1].tobytes()
    np.testing.assert_array_equal(client.get(handle, release=True), array)


@pytest.mark.parametrize(
    ("dtype", "values", "got"),
    [
        ("float32", [0.0, 1e300], "1e+300 at [1], which does not fit into float32"),
        ("float16", [[np.inf, 70000.0]], "70000 at [0, 1], which does not fit into float16"),
        ("float16", np.array([65504, 65536]), "65536 at [1], which does not fit into float16"),
        ("bfloat16", np.array(3.4e38, np.float32), "3.4e+38, which does not fit into bfloat16"),
    ],
)
def test_a_handle_is_refused_as_its_array(client: gradserve.Client, dtype: str, values: Any, got: str) -> None:
    model = client.gradient_accumulator({"a": {"w": gradserve.DenseSpec(dtype)}})
    for gradient in (values, client.put(values)):
        with pytest.raises(gradserve.InvalidArgumentError, match=re.escape(got)) as raised:
            model.apply_grad({"a": {"w": gradient}})
        assert f"values of {dtype}" in str(raised.value)
        assert "component 'a/w'" in str(raised.value)
    assert model.num_accumulated() == 0


def test_a_handle_of_complex_numbers_is_refused(client: gradserve.Client) -> None:
    model = client.gradient_accumulator({"w": np.zeros(1)})
    message = "component 'w': expected float64 or another real dtype, got complex128"
    with pytest.raises(gradserve.InvalidArgumentError, match=message):
        model.apply_grad({"w": client.put([1j])})


def test_a_handle_that_is_gone_names_the_component(client: gradserve.Client) -> None:
    model = client.gradient_accumulator({"v": np.zeros(1), "w": np.zeros(1)})
    handle = client.put([1.0])
    client.delete(handle)
    with pytest.raises(gradserve.NotFoundError, match=f"component 'w': no tensor with the handle '{handle.handle}'"):
        model.apply_grad({"v": [1.0], "w": handle})


def test_not_finite_is_refused_after_the_conversion(client: gradserve.Client) -> None:
    acc = client.conditional_accumulator("float16", refuse_non_finite=True)
    acc.apply_grad(client.put(np.array([-1, 31744])))  # the bits of infinity, if it were a float16
    with pytest.raises(gradserve.InvalidArgumentError, match="expected finite values, got inf"):
        acc.apply_grad(client.put([np.inf, 0.0]))


def test_stored_rows_are_converted(server_address: str, name: str) -> None:
    rows = component("e", dims=[5, 1], layout=accumulator_pb2.LAYOUT_SPARSE)
    with RawCalls(server_address) as raw, gradserve.connect(server_address) as client:
        raw.call("CreateAccumulator", Create(accumulator=ref(name), spec=spec(rows)))

        def applying(value: float) -> Apply:
            stored = tensor_pb2.Tensor(handle=client.put(np.array([[1.0], [value]])).handle)
            return Apply(accumulator=ref(name), gradient=[sparse([1, 3], stored, name="e")])

        raw.call("ApplyGradient", applying(2.0))
        failure = raw.fail("ApplyGradient", applying(1e300))
        assert failure.message.startswith("component 'e': expected values of float32, got 1e+300 at [1, 0]")
        assert failure.field == "gradient[0].sparse.values"
        average = raw.call("TakeGradient", Take(accumulator=ref(name), num_required=1)).average
        assert np.frombuffer(average.components[0].sparse.values.content, np.float32).tolist() == [1, 2]
        raw.call("DeleteAccumulator", messages_pb2.DeleteAccumulatorRequest(accumulator=ref(name)))


def test_what_comes_inline_is_not_converted(server_address: str, name: str) -> None:
    """Another dtype there is a mistake of whoever wrote the message."""
    with RawCalls(server_address) as raw:
        raw.call("CreateAccumulator", Create(accumulator=ref(name), spec=spec(component("w"))))
        failure = raw.fail(
            "ApplyGradient", Apply(accumulator=ref(name), gradient=[dense(tensor([1], np.float64), "w")])
        )
        assert failure.message == "component 'w': expected dtype float32, got float64"
        raw.call("DeleteAccumulator", messages_pb2.DeleteAccumulatorRequest(accumulator=ref(name)))
