"""What accumulators take, and the trees that they give back."""

import re
from collections import namedtuple
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import gradserve
from tests.conversion.stand_ins import CopyingFromGpu, DType, Exporting, OnGpu, Tensor, dtype

MASKED = np.ma.MaskedArray([1.0, 2.0], [False, True])
Dense = namedtuple("Dense", ["w", "b"])

PARAMETERS: dict[str, Any] = {
    "embedding": np.zeros((4, 2), np.float32),
    "layers": [Dense(np.zeros((2, 3)), np.zeros(3, np.float16)), (), Dense(np.zeros((3, 1)), None)],
}
NAMES = ["embedding", "layers/0/w", "layers/0/b", "layers/2/w"]


def shapes(tree: Any) -> Any:
    """A tree with the dtypes and shapes of its arrays in their places."""
    if isinstance(tree, dict):
        return {key: shapes(child) for key, child in tree.items()}
    if isinstance(tree, list | tuple):
        children = [shapes(child) for child in tree]
        return type(tree)(*children) if hasattr(tree, "_fields") else type(tree)(children)
    return tree if tree is None else (tree.dtype.name, tree.shape)


def filled(value: float) -> Any:
    layers = [Dense(np.full((2, 3), value), np.full(3, value)), (), Dense(np.full((3, 1), value), None)]
    return {"layers": layers, "embedding": np.full((4, 2), value)}


# --- Trees


def test_a_tree_of_parameters(client: gradserve.Client) -> None:
    model = client.gradient_accumulator(PARAMETERS)
    model.apply_grad(filled(1.0))
    average = model.take_grad(1)
    assert list(average) == NAMES
    assert shapes(average.gradients) == shapes(PARAMETERS)
    assert average.gradients["layers"][0].w is average["layers/0/w"]
    pulled = model.push_pull(filled(3.0), 1, local_step=1)
    assert shapes(pulled.gradients) == shapes(PARAMETERS)
    assert (pulled["layers/2/w"] == 3).all()
    assert shapes(model.read_average(2).gradients) == shapes(PARAMETERS)


def test_a_flat_dict(client: gradserve.Client) -> None:
    model = client.gradient_accumulator({"w": np.zeros(2), "b": 0.0})
    average = model.push_pull({"b": 1, "w": [2, 3]}, 1)
    assert (average["w"].tolist(), average["b"].tolist()) == ([2, 3], 1)
    assert type(average.gradients) is dict
    assert average.gradients == dict(average)


def test_a_tree_and_its_names_are_one(client: gradserve.Client, name: str) -> None:
    """Another client has the same model by name, in another order."""
    model = client.gradient_accumulator(PARAMETERS, name)
    specs = {each: gradserve.DenseSpec("float32", (4, 2)) for each in NAMES[:1]} | {
        "layers/2/w": np.zeros((3, 1)),
        "layers/0/b": np.zeros(3, np.float16),
        "layers/0/w": np.zeros((2, 3)),
    }
    flat = client.gradient_accumulator(specs, name)
    model.apply_grad(filled(1.0))
    flat.apply_grad({"embedding": np.full((4, 2), 3), "layers": filled(3.0)["layers"]})
    average = flat.take_grad(2)
    assert list(average) == list(specs)
    assert {each: value.flat[0] for each, value in average.items()} == dict.fromkeys(NAMES, 2)
    assert shapes(model.read_average().gradients) == shapes(PARAMETERS)
    model.delete()


def test_one_array_is_a_tree(client: gradserve.Client) -> None:
    model = client.gradient_accumulator(np.zeros(2))
    average = model.push_pull([1, 2], 1)
    assert average.gradients.tolist() == average[""].tolist() == [1, 2]


def test_a_stale_gradient_without_an_average_has_no_tree(client: gradserve.Client) -> None:
    model = client.gradient_accumulator(PARAMETERS)
    model.set_global_step(5)
    assert model.push_pull(filled(1.0), 1, on_stale="return").gradients is None


OTHER_TREES: dict[str, tuple[Any, str]] = {
    "another leaf": ({**filled(1.0), "x": 1.0}, "expected components ['embedding', "),
    "a leaf for a branch": ({**filled(1.0), "layers": 1.0}, "for the gradient, got 'layers'"),
    "a branch for a leaf": ({**filled(1.0), "embedding": {"x": 1.0}}, "component 'embedding', got {'x': 1.0}"),
    "another shape": ({**filled(1.0), "embedding": np.zeros(3)}, "component 'embedding': Shape mismatch: expected ["),
    "a leaf too few": ({"embedding": np.zeros((4, 2))}, "expected a gradient of component 'layers/0/w', got none"),
    "no gradients": ({**filled(1.0), "embedding": None}, "expected a gradient of component 'embedding', got None"),
    "nothing": (None, "expected a gradient of component 'embedding', got none"),
    "text": ("abc", "for the gradient, got str"),
    "rows": (
        {**filled(1.0), "embedding": gradserve.IndexedSlices(np.ones((1, 2)), np.array([0]))},
        "expected an array or numbers for component 'embedding', got rows, which a SparseSpec takes",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("gradient", "message"), OTHER_TREES.values(), ids=OTHER_TREES)
def test_another_tree(client: gradserve.Client, gradient: Any, message: str) -> None:
    model = client.gradient_accumulator(PARAMETERS)
    for call in (model.apply_grad, lambda tree: model.push_pull(tree, 1)):
        with pytest.raises(gradserve.InvalidArgumentError, match=re.escape(message)):
            call(gradient)
    assert model.num_accumulated() == 0


@pytest.mark.parametrize(
    ("components", "message"),
    [
        ({"w": None}, "expected at least one component, got none"),
        ({}, "expected at least one component, got none"),
        (None, "expected at least one component, got none"),
        ("abc", "expected an array or numbers for components, got 'abc'"),
        ({"w": "abc"}, "expected an array or numbers for component 'w', got 'abc'"),
        ({"w": [1, 2]}, "component 'w': expected a dtype out of float16, bfloat16, float32, float64, got int64"),
        ({"a": {"w": object()}}, "for component 'a/w', got object"),
        ({"w": MASKED}, "for component 'w', got a masked array"),
        ({"w": gradserve.DenseSpec("float33")}, "for the dtype of component 'w', got float33"),
        (
            {"w": gradserve.DenseSpec("float32", (1.5,))},  # type: ignore[arg-type]
            "expected an integer for the shape of component 'w', got 1.5",
        ),
        ({"w": gradserve.DenseSpec("float32", 3)}, "for the shape of component 'w', got 3"),  # type: ignore[arg-type]
        ({1.5: np.zeros(2)}, "expected names as keys for components, got 1.5"),
    ],
)
def test_what_is_no_tree_of_parameters(client: gradserve.Client, components: Any, message: str) -> None:
    with pytest.raises(gradserve.InvalidArgumentError, match=re.escape(message)):
        client.gradient_accumulator(components)


def test_parameters_without_values(client: gradserve.Client) -> None:
    """jax.ShapeDtypeStruct, tf.TensorSpec, tensors of a GPU: only what they are like counts."""
    like = SimpleNamespace(dtype=DType("float32"), shape=(2, None))
    on_gpu = OnGpu()
    on_gpu.shape = (1,)  # type: ignore[attr-defined]
    model = client.gradient_accumulator({"a": like, "b": on_gpu, "c": Tensor([1], "bfloat16", requires_grad=True)})
    average = model.push_pull({"a": np.ones((2, 3)), "b": [1], "c": [2]}, 1)
    assert shapes(average.gradients) == {"a": ("float32", (2, 3)), "b": ("float32", (1,)), "c": ("bfloat16", (1,))}


# --- Gradients that are not there


def test_zeros_for_what_is_missing(client: gradserve.Client) -> None:
    sparse = gradserve.SparseSpec("float32", (5, 2))
    model = client.gradient_accumulator({"w": np.zeros(2), "b": np.zeros(1), "e": sparse}, missing="zeros")
    rows = gradserve.IndexedSlices(np.ones((1, 2)), np.array([3]))
    model.apply_grad({"w": [2, 4], "b": None, "e": rows})
    model.apply_grad({"w": None})
    average = model.take_grad(2)
    assert (average["w"].tolist(), average["b"].tolist()) == ([1, 2], [0])
    taken = average["e"]
    assert isinstance(taken, gradserve.IndexedSlices)
    assert (taken.indices.tolist(), taken.values.tolist()) == ([3], [[1, 1]])


@pytest.mark.parametrize(
    "spec", [gradserve.DenseSpec("float32"), gradserve.DenseSpec("float32", (2, None)), gradserve.SparseSpec("float32")]
)
def test_zeros_need_a_shape(client: gradserve.Client, spec: gradserve.DenseSpec | gradserve.SparseSpec) -> None:
    model = client.gradient_accumulator({"w": spec, "b": np.zeros(1)}, missing="zeros")
    with pytest.raises(
        gradserve.InvalidArgumentError, match="of component 'w', got none; zeros cannot replace it, as its shape"
    ):
        model.apply_grad({"b": [1]})


@pytest.mark.parametrize("missing", ["nothing", None, 0, []])
def test_what_missing_can_be(client: gradserve.Client, missing: Any) -> None:
    with pytest.raises(gradserve.InvalidArgumentError, match="expected 'error' or 'zeros' for missing, got"):
        client.gradient_accumulator({"w": np.zeros(1)}, missing=missing)


# --- Tensors


@pytest.mark.parametrize(
    "gradient",
    [
        Tensor([1, 2], requires_grad=True),
        Tensor([1, 2], "bfloat16", requires_grad=True),
        Tensor([1, 2], "int32"),
        Exporting([1, 2]),
        CopyingFromGpu([1.0, 2.0]),
        [Tensor(1, requires_grad=True), 2],
    ],
    ids=lambda each: type(each).__name__,
)
def test_tensors_of_other_libraries(client: gradserve.Client, gradient: Any) -> None:
    dense = client.conditional_accumulator("float32")
    dense.apply_grad(gradient)
    assert dense.take_grad(1).tolist() == [1, 2]
    sparse = client.sparse_conditional_accumulator("float32")
    sparse.apply_grad(Exporting([3, 5]), gradient, grad_shape=[7])  # type: ignore[arg-type]  # a list, as users may have
    taken = sparse.take_grad(1)
    assert (taken.indices.tolist(), taken.values.tolist()) == ([3, 5], [1, 2])
    model = client.gradient_accumulator({"w": np.zeros(2)})
    assert model.push_pull({"w": gradient}, 1)["w"].tolist() == [1, 2]


class IndexedSlices:
    """As TensorFlow's."""

    def __init__(self, values: Any, indices: Any, dense_shape: Any = None) -> None:
        self.values, self.indices, self.dense_shape = values, indices, dense_shape


class SparseTensor:
    """A tensor of PyTorch in the COO layout, as the gradient of an embedding."""

    is_sparse = True
    shape = (5, 2)

    def sparse_dim(self) -> int:
        return 1

    def detach(self) -> "SparseTensor":
        return self

    def coalesce(self) -> "SparseTensor":
        return self

    def indices(self) -> Any:
        return np.array([[1, 3]])

    def values(self) -> Any:
        return Tensor([[1, 2], [3, 4]])


@pytest.mark.parametrize(
    "rows",
    [
        gradserve.IndexedSlices(Tensor([[1, 2], [3, 4]]), [1, 3]),  # type: ignore[arg-type]
        IndexedSlices(Tensor([[1, 2], [3, 4]]), Tensor([1, 3], "int32"), Tensor([5, 2], "int32")),
        SparseTensor(),
    ],
    ids=["ours", "TensorFlow's", "PyTorch's"],
)
def test_rows_of_other_libraries(client: gradserve.Client, rows: Any) -> None:
    model = client.gradient_accumulator({"e": gradserve.SparseSpec("float32", (5, 2)), "w": np.zeros(1)})
    average = model.push_pull({"e": rows, "w": [1]}, 1)
    pushed = average["e"]
    assert isinstance(pushed, gradserve.IndexedSlices)
    assert (pushed.indices.tolist(), pushed.values.tolist()) == ([1, 3], [[1, 2], [3, 4]])
    alone = client.sparse_conditional_accumulator("float32", (5, 2))
    alone.apply_indexed_slices_grad(rows)
    assert alone.take_grad(1).values.tolist() == [[1, 2], [3, 4]]


def test_parameters_as_rows(client: gradserve.Client) -> None:
    like = gradserve.IndexedSlices(np.zeros((0, 2), np.float32), np.zeros(0, np.int64), (5, 2))
    model = client.gradient_accumulator({"e": like})
    model.apply_grad({"e": like})
    with pytest.raises(gradserve.InvalidArgumentError, match="component 'e': Shape mismatch: index of slice 0"):
        model.apply_grad({"e": gradserve.IndexedSlices(np.ones((1, 2)), np.array([5]))})


@pytest.mark.parametrize(
    ("given", "name"),
    [(dtype("bfloat16"), "bfloat16"), (DType("float64"), "float64"), (np.float16, "float16"), (float, "float64")],
)
def test_dtypes_of_other_libraries(client: gradserve.Client, given: Any, name: str) -> None:
    accumulator = client.conditional_accumulator(given, (1,), accumulate_dtype=dtype("float64"))
    accumulator.apply_grad([1])
    assert accumulator.take_grad(1).dtype.name == name
    rows = client.sparse_conditional_accumulator(given)
    rows.apply_grad([0], [1])
    assert rows.take_grad(1).values.dtype.name == name


@pytest.mark.parametrize("name", ["mean", "MEAN", "sum", "SUM"])
def test_reductions_in_any_case(client: gradserve.Client, name: str) -> None:
    accumulator = client.conditional_accumulator("float32", reduction_type=name)
    accumulator.apply_grad([2])
    accumulator.apply_grad([4])
    assert accumulator.take_grad(2) == (3 if name.lower() == "mean" else 6)


# --- Values that do not fit


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([0.0, 1e300], "expected values of float16 for {}, got 1e+300 at [1], which does not fit into float16"),
        (np.array([70000], np.int32), "got 70000 at [0], which does not fit into float16"),
        (Tensor([1e10], "bfloat16"), "which does not fit into float16"),
        (MASKED, "expected an array or numbers for {}, got a masked array"),
        ([MASKED], "got a masked array"),
        ([1j], "expected real numbers for {}, got an array of complex128"),
        ([[1.0], [2.0, 3.0]], "expected an array or numbers for {}, got rows of different lengths"),
        ("abc", "expected an array or numbers for {}, got 'abc'"),
        (OnGpu(), "for {}, got OnGpu on cuda:0; copy it first, for example with .cpu()"),
    ],
)
def test_gradients_that_cannot_be(client: gradserve.Client, value: Any, message: str) -> None:
    model = client.gradient_accumulator(
        {"a": {"w": gradserve.DenseSpec("float16")}, "e": gradserve.SparseSpec("float16")}
    )
    no_rows = gradserve.IndexedSlices(np.zeros(0), np.zeros(0))
    rows = gradserve.IndexedSlices(value, np.zeros(2, np.int64))
    calls: dict[str, Any] = {
        "the gradient": lambda: client.conditional_accumulator("float16").apply_grad(value),
        "component 'a/w'": lambda: model.apply_grad({"a": {"w": value}, "e": no_rows}),
        "the values of the gradient": lambda: client.sparse_conditional_accumulator("float16").apply_grad([0], value),
        "the values of component 'e'": lambda: model.push_pull({"a": {"w": [1]}, "e": rows}, 1),
    }  # fmt: skip
    for title, call in calls.items():
        with pytest.raises(gradserve.InvalidArgumentError, match=re.escape(message.format(title))):
            call()


def test_what_is_infinite_stays_so(client: gradserve.Client) -> None:
    accumulator = client.conditional_accumulator("float16")
    accumulator.apply_grad([np.inf, -np.inf, np.nan, 1])
    np.testing.assert_array_equal(accumulator.take_grad(1), np.array([np.inf, -np.inf, np.nan, 1]))


@pytest.mark.parametrize("indices", [[0.5], [2**63], "a", [[0], [1, 2]], MASKED, None])
def test_indices_that_cannot_be(client: gradserve.Client, indices: Any) -> None:
    accumulator = client.sparse_conditional_accumulator("float32")
    with pytest.raises(gradserve.InvalidArgumentError, match="for the indices of the gradient, got"):
        accumulator.apply_grad(indices, [1.0])


def test_the_gradients_are_those_of_tree_map(client: gradserve.Client) -> None:
    """`gradients` can be mapped together with the parameters, as by jax.tree.map."""

    def tree_map(function: Any, *trees: Any) -> Any:
        first = trees[0]
        if isinstance(first, Mapping):
            assert all(type(tree) is type(first) and tree.keys() == first.keys() for tree in trees)
            return {key: tree_map(function, *(tree[key] for tree in trees)) for key in first}
        if isinstance(first, list | tuple):
            assert all(type(tree) is type(first) and len(tree) == len(first) for tree in trees)
            return [tree_map(function, *children) for children in zip(*trees, strict=True)]
        assert all((tree is None) == (first is None) for tree in trees)
        return None if first is None else function(*trees)

    model = client.gradient_accumulator(PARAMETERS)
    average = model.push_pull(filled(2.0), 1)
    stepped = tree_map(lambda p, g: p - 0.5 * g, PARAMETERS, average.gradients)
    assert (stepped["layers"][0][0] == -1).all()
    assert stepped["layers"][2][1] is None
    assert stepped["embedding"].dtype == np.float32
