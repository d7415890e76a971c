"""What a layer is made of, and where: arguments, names, faces."""

import inspect
from typing import Any

import numpy as np
import pytest

import gradserve
import gradserve.aio
from gradserve import Initializer, RandomAdjustment, Regularizer
from gradserve_protocol.v1 import batch_norm_layer_pb2 as batch_norm_pb2
from gradserve_protocol.v1 import layer_pb2, tensor_pb2
from tests.client.test_faces import is_awaited, public_methods
from tests.layers.client.fake_server import (
    DY,
    FACES,
    HANDLE,
    LARGE,
    Context,
    FakeLayerServer,
    X,
    array_of,
    result_of,
)

# --- Two faces


def test_both_faces_are_alike() -> None:
    blocking, awaited = gradserve.BatchNormLayer, gradserve.aio.BatchNormLayer
    assert public_methods(blocking) == public_methods(awaited)
    # A property cannot be awaited: only the blocking face has this one beside the method.
    assert set(dir(blocking)) ^ set(dir(awaited)) == {"variables", "__enter__", "__exit__", "__aenter__", "__aexit__"}
    for method in {*public_methods(blocking), "__call__"}:
        ours, theirs = getattr(blocking, method), getattr(awaited, method)
        assert inspect.signature(ours).parameters == inspect.signature(theirs).parameters, method
        assert ours.__doc__, method
        assert ours.__doc__ == theirs.__doc__, method
        assert not is_awaited(ours), method
        assert is_awaited(theirs), method


def test_the_signature_is_tensorflows() -> None:
    """In its order, without what belongs to a call; ours follow as keywords."""
    parameters = list(inspect.signature(gradserve.Client.batch_norm).parameters.values())[1:]
    theirs = [each.name for each in parameters if each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    assert theirs == [
        *("decay", "center", "scale", "epsilon", "activation_fn", "param_initializers", "param_regularizers"),
        *("updates_collections", "reuse", "variables_collections", "outputs_collections", "trainable", "fused"),
        *("data_format", "zero_debias_moving_mean", "scope", "renorm", "renorm_clipping", "renorm_decay"),
        "adjustment",
    ]
    ours = [each.name for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY]
    assert ours == ["container", "renorm_zero_debias", "input_shape", "dtype", "idle_lease", "durability"]


def test_variables_is_a_property_of_the_blocking_face(server: FakeLayerServer) -> None:
    layer = FACES[0](server).batch_norm(scope="bn")
    assert layer.variables.keys() == {"beta", "moving_mean"}


# --- Arguments

DEFAULTS: dict[str, Any] = {
    "decay": 0.999,
    "center": True,
    "scale": False,
    "epsilon": 0.001,
    "updates_collections": ["update_ops"],
    "trainable": True,
    "data_format": "NHWC",
    "zero_debias_moving_mean": False,
    "renorm": False,
    "renorm_decay": 0.99,
    "renorm_zero_debias": False,
}

ARGUMENTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "defaults": ({}, {}),
    "decay": ({"decay": 0.9}, {"decay": 0.9}),
    "decay 0": ({"decay": 0.0}, {"decay": 0.0}),
    "no center": ({"center": False}, {"center": False}),
    "scale": ({"scale": True}, {"scale": True}),
    "epsilon": ({"epsilon": 1e-5}, {"epsilon": 1e-5}),
    "activation": ({"activation_fn": "relu"}, {"activation_fn": "relu"}),
    "not trainable": ({"trainable": False}, {"trainable": False}),
    "fused": ({"fused": True}, {"fused": True}),
    "not fused": ({"fused": False}, {"fused": False}),
    "NCHW": ({"data_format": "NCHW"}, {"data_format": "NCHW"}),
    "zero_debias": ({"zero_debias_moving_mean": True}, {"zero_debias_moving_mean": True}),
    "renorm": (
        {"renorm": True, "renorm_decay": 0.5, "renorm_clipping": {"rmax": 3.0, "dmax": 5.0}},
        {"renorm": True, "renorm_decay": 0.5, "renorm_clipping": {"rmax": 3.0, "dmax": 5.0}},
    ),
    "old renorm": ({"renorm": True, "renorm_zero_debias": True}, {"renorm": True, "renorm_zero_debias": True}),
    "in place": ({"updates_collections": None}, {"updates_collections": [], "in_place_updates": True}),
    "another collection": ({"updates_collections": "mine"}, {"updates_collections": ["mine"]}),
    "several collections": ({"updates_collections": ("a", "b")}, {"updates_collections": ["a", "b"]}),
    "a tag of all variables": (
        {"variables_collections": "tag"},
        {"variables_collections": {"": layer_pb2.CollectionNames(names=["tag"])}},
    ),
    "tags of all variables": (
        {"variables_collections": ("a", "b")},
        {"variables_collections": {"": layer_pb2.CollectionNames(names=["a", "b"])}},
    ),
    "tags by variable": (
        {"variables_collections": {"beta": "a", "gamma": ("b", "c")}},
        {
            "variables_collections": {
                "beta": layer_pb2.CollectionNames(names=["a"]),
                "gamma": layer_pb2.CollectionNames(names=["b", "c"]),
            }
        },
    ),
    "a tag of the outputs": ({"outputs_collections": "out"}, {"outputs_collections": ["out"]}),
    "tags of the outputs": ({"outputs_collections": ("a", "b")}, {"outputs_collections": ["a", "b"]}),
    "regularizers": (
        {"param_regularizers": {"beta": Regularizer("l1", l1=0.5), "gamma": Regularizer("l1_l2")}},
        {
            "param_regularizers": {
                "beta": layer_pb2.Regularizer(name="l1", l1=0.5),
                "gamma": layer_pb2.Regularizer(name="l1_l2"),
            }
        },
    ),
    "adjustment": (
        {"adjustment": RandomAdjustment(scale=(0.9, 1.1), bias=(-0.5, 0.5), seed=7)},
        {"adjustment": {"scale_min": 0.9, "scale_max": 1.1, "bias_min": -0.5, "bias_max": 0.5, "seed": 7}},
    ),
    "adjustment without a seed": (
        {"adjustment": RandomAdjustment((0.9, 1.1), (0.0, 0.0))},
        {"adjustment": {"scale_min": 0.9, "scale_max": 1.1}},
    ),
    "initializers": (
        {
            "param_initializers": {
                "beta": Initializer("normal", mean=1.0, stddev=0.5, seed=3),
                "gamma": Initializer("uniform", minval=-1.0, maxval=2.0),
                "moving_mean": Initializer("constant", value=0.0),
            }
        },
        {
            "param_initializers": {
                "beta": layer_pb2.Initializer(named={"name": "normal", "mean": 1.0, "stddev": 0.5, "seed": 3}),
                "gamma": layer_pb2.Initializer(named={"name": "uniform", "minval": -1.0, "maxval": 2.0}),
                "moving_mean": layer_pb2.Initializer(named={"name": "constant", "value": 0.0}),
            }
        },
    ),
}


def config(**different: Any) -> batch_norm_pb2.BatchNormConfig:
    values = DEFAULTS | different
    tags = values.pop("variables_collections", {})
    message = batch_norm_pb2.BatchNormConfig(**values)
    for name, names in tags.items():
        message.variables_collections[name].CopyFrom(names)
    return message


@pytest.mark.parametrize(("given", "different"), ARGUMENTS.values(), ids=list(ARGUMENTS))
def test_arguments(client: Any, server: FakeLayerServer, given: dict[str, Any], different: dict[str, Any]) -> None:
    result_of(client.batch_norm(**given))
    assert server.last("CreateBatchNormLayer").config == config(**different)


@pytest.mark.parametrize(("given", "different"), ARGUMENTS.values(), ids=list(ARGUMENTS))
def test_a_description_has_the_arguments(
    client: Any, server: FakeLayerServer, bn: Any, given: dict[str, Any], different: dict[str, Any]
) -> None:
    server.replies["DescribeBatchNormLayer"] = {"info": {"config": config(**different)}}
    parameters = inspect.signature(gradserve.Client.batch_norm).parameters
    elsewhere = {"self", "reuse", "scope", "container", "input_shape", "dtype", "idle_lease", "durability"}
    defaults = {name: each.default for name, each in parameters.items() if name not in elsewhere}
    assert result_of(bn.describe()).arguments == defaults | given


@pytest.mark.parametrize("name", [None, "", "none"])
def test_no_activation(client: Any, server: FakeLayerServer, bn: Any, name: str | None) -> None:
    result_of(client.batch_norm(activation_fn=name))
    assert server.last("CreateBatchNormLayer").config == config()
    server.replies["DescribeBatchNormLayer"] = {"info": {"config": config(activation_fn=name)}}
    assert result_of(bn.describe()).arguments["activation_fn"] is None


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (np.ones(3, np.float32), "float32"),
        (np.ones(3, np.float16), "float16"),
        ([1, 1, 1], "float64"),
        (np.ones(5000, np.float32), "float32"),  # kept beside the message until it is written
    ],
)
def test_initial_values(client: Any, server: FakeLayerServer, value: Any, dtype: str) -> None:
    result_of(client.batch_norm(param_initializers={"beta": value, "gamma": "ones", "moving_mean": None}))
    sent = server.last("CreateBatchNormLayer").config.param_initializers
    assert sorted(sent) == ["beta", "gamma"]
    assert array_of(sent["beta"].tensor).dtype == dtype
    assert (array_of(sent["beta"].tensor) == 1).all()
    assert sent["gamma"].named == layer_pb2.NamedInitializer(name="ones")


def test_large_initial_values_are_uploaded_and_deleted(client: Any, server: FakeLayerServer) -> None:
    result_of(client.batch_norm(param_initializers={"beta": LARGE.reshape(-1), "gamma": HANDLE}))
    sent = server.last("CreateBatchNormLayer").config.param_initializers
    assert sent["beta"].tensor.handle.startswith("uploaded")
    assert sent["gamma"].tensor.handle == "mine"
    assert not server.stored


def test_a_description_has_initial_values(server: FakeLayerServer, bn: Any) -> None:
    listed = tensor_pb2.Tensor(dtype=tensor_pb2.DATA_TYPE_FLOAT32, shape=[3])
    initializers: dict[str, Any] = {"beta": {"named": {"name": "normal", "seed": 3}}, "gamma": {"tensor": listed}}
    given = batch_norm_pb2.BatchNormConfig()
    for name, each in initializers.items():
        given.param_initializers[name].CopyFrom(layer_pb2.Initializer(**each))
    server.replies["DescribeBatchNormLayer"] = {"info": {"config": given}}
    read = result_of(bn.describe()).arguments["param_initializers"]
    assert read["beta"] == gradserve.Initializer("normal", seed=3)
    assert read["gamma"] == gradserve.DenseSpec(np.float32, (3,))


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "reuse without a scope": ({"reuse": True}, "reuse", "reuse=True cannot be used without a name_or_scope"),
    "reuse": ({"reuse": "maybe"}, "reuse", "expected reuse None, True or False, got 'maybe'"),
    "decay": ({"decay": None}, "decay", "expected a number for decay, got None"),
    "a function": ({"activation_fn": np.tanh}, "activation_fn", "expected text for activation_fn, got ufunc"),
    "no collection": ({"updates_collections": []}, "updates_collections", "or None to update in place, got none"),
    "collections": (
        {"updates_collections": [1]},
        "updates_collections",
        "of collections for updates_collections, got [1]",
    ),
    "tags": ({"outputs_collections": [b"a"]}, "outputs_collections", "expected names of collections"),
    "tags by variable": ({"variables_collections": {"beta": [1]}}, "variables_collections", "expected names"),
    "clipping": ({"renorm_clipping": {"rmax": "big"}}, "renorm_clipping", "expected a number for rmax, got 'big'"),
    "adjustment": ({"adjustment": (X, X)}, "adjustment", "pass tensors to the layer's calls"),
    "seed": (
        {"adjustment": RandomAdjustment((0, 1), (0, 1), -1)},
        "adjustment",
        "expected an integer from 0 to 18446744073709551615 for seed, got -1",
    ),
    "a scale of one number": (
        {"adjustment": RandomAdjustment(scale=1.0, bias=(0, 0))},  # type: ignore[arg-type]
        "adjustment",
        "expected a pair, (low, high), as scale of a RandomAdjustment, got 1.0",
    ),
    "a bias of three": (
        {"adjustment": RandomAdjustment(scale=(0, 1), bias=(0, 1, 2))},  # type: ignore[arg-type]
        "adjustment",
        "as bias of a RandomAdjustment, got (0, 1, 2)",
    ),
    "words as bounds": (
        {"adjustment": RandomAdjustment(scale="ab", bias=(0, 1))},  # type: ignore[arg-type]
        "adjustment",
        "expected a number for scale_min, got 'a'",
    ),
    **{
        f"{what} in place of {argument} by name": ({argument: value}, argument, "expected a dict by name")
        for argument in ("param_initializers", "param_regularizers", "renorm_clipping")
        for what, value in {"a list": [np.ones(3)], "a word": "ones", "an empty list": [], "a number": 0.1}.items()
    },
    **{
        f"{what} among {argument}": ({argument: {key: value}}, argument, "expected names as keys")
        for argument, value in {
            "param_initializers": np.ones(3),
            "param_regularizers": Regularizer("l2", l2=0.1),
            "renorm_clipping": 3.0,
            "variables_collections": "tag",
        }.items()
        for what, key in {"a number": 1, "bytes": b"beta", "no name": None}.items()
    },
    "a name that is no text": (
        {"param_initializers": {"\ud800": "ones"}},
        "param_initializers",
        "expected names as keys",
    ),
    "a collection that is no text": (
        {"updates_collections": "\ud800"},
        "updates_collections",
        "expected names of collections",
    ),
    **{
        f"a number as {argument}": ({argument: 1}, argument, f"expected names of collections for {argument}, got 1")
        for argument in ("updates_collections", "variables_collections", "outputs_collections")
    },
    "a scope that is no name": ({"scope": 0}, "scope", "expected a name as scope, got 0"),
    "a scope that is no text": ({"scope": "\ud800"}, "scope", "expected a name as scope"),
    "a container that is no name": ({"container": None}, "container", "expected a name as container, got None"),
    "regularizer": ({"param_regularizers": {"beta": 0.1}}, "param_regularizers", "expected a Regularizer or None"),
    "initializer": (
        {"param_initializers": {"beta": Initializer("normal", mean="high")}},  # type: ignore[arg-type]
        "param_initializers",
        "expected a number for mean, got 'high'",
    ),
    "initial value": ({"param_initializers": {"beta": ["a"]}}, "param_initializers", "expected an array or numbers"),
    "shape alone": ({"input_shape": (None, 3)}, "dtype", "together, or neither, got only input_shape"),
    "dtype alone": ({"dtype": "float32"}, "input_shape", "together, or neither, got only dtype"),
    "shape": (
        {"input_shape": ("N", 3), "dtype": "float32"},
        "input_shape",
        "expected an integer for input_shape, got 'N'",
    ),
    "dtype": ({"input_shape": (None, 3), "dtype": "datetime64"}, "dtype", "expected a dtype out of"),
}


@pytest.mark.parametrize(("arguments", "field", "words"), REFUSED.values(), ids=list(REFUSED))
def test_arguments_that_cannot_be(
    client: Any, server: FakeLayerServer, arguments: dict[str, Any], field: str, words: str
) -> None:
    with pytest.raises(gradserve.InvalidArgumentError) as error:
        result_of(client.batch_norm(**arguments))
    assert words in str(error.value)
    assert error.value.field == field
    assert not server.requests


# --- Names


def test_a_layer_without_a_scope_is_the_clients_own(client: Any, server: FakeLayerServer) -> None:
    made = [result_of(client.batch_norm()) for _ in range(2)]
    assert len({layer.name for layer in made}) == 2
    for layer in made:
        assert layer.name.startswith("BatchNorm-")
        assert "me" not in layer.name.split("-")
    shared = result_of(client.batch_norm(scope="bn", container="c"))
    assert (shared.name, shared.container) == ("bn", "c")
    owners = [request.lifetime.owner_client_id for request in server.of("CreateBatchNormLayer")]
    assert owners == ["me", "me", ""]
    result_of(client.close())
    assert [request.client_id for request in server.of("EndClientLease")] == ["me"]


def test_a_layer_of_its_own_is_deleted_once(client: Any, server: FakeLayerServer) -> None:
    for _ in range(3):
        with Context(result_of(client.batch_norm())):
            pass
    result_of(result_of(client.batch_norm()).delete())
    failing = result_of(client.batch_norm())
    server.failures["DeleteBatchNormLayer"] = [gradserve.UnavailableError("gone")]
    with Context(failing):
        pass
    assert len(server.of("DeleteBatchNormLayer")) == 5
    result_of(client.close())
    result_of(client.close())
    assert len(server.of("EndClientLease")) == 1  # for the one that may be there


def test_a_client_that_has_nothing_of_its_own_ends_no_lease(client: Any, server: FakeLayerServer) -> None:
    result_of(result_of(client.batch_norm()).delete())
    result_of(client.batch_norm(scope="bn"))
    result_of(client.close())
    assert server.of("EndClientLease") == []


@pytest.mark.parametrize(
    ("reuse", "sent"),
    [
        (None, layer_pb2.LAYER_REUSE_UNSPECIFIED),
        (True, layer_pb2.LAYER_REUSE_REQUIRED),
        (False, layer_pb2.LAYER_REUSE_FORBIDDEN),
    ],
)
def test_reuse(client: Any, server: FakeLayerServer, reuse: bool | None, sent: int) -> None:
    for _ in range(2):
        result_of(client.batch_norm(scope="bn", reuse=reuse))
    first, second = server.of("CreateBatchNormLayer")
    assert first.reuse == second.reuse == sent
    assert first.layer == batch_norm_pb2.BatchNormLayerRef(name="bn")
    assert first.creation_id != second.creation_id


@pytest.mark.parametrize("unknown", [None, -1])
def test_variables_created_at_once(client: Any, server: FakeLayerServer, unknown: int | None) -> None:
    result_of(client.batch_norm(input_shape=(unknown, 4, 3), dtype="bfloat16"))
    request = server.last("CreateBatchNormLayer")
    assert (request.input_dtype, list(request.input_shape)) == (tensor_pb2.DATA_TYPE_BFLOAT16, [-1, 4, 3])


def test_calls_are_for_the_very_layer(server: FakeLayerServer, bn: Any) -> None:
    result_of(bn(X))
    result_of(bn.backward(DY))
    for call in (bn.run_updates, bn.describe, bn.get_variables, bn.delete):
        result_of(call())
    layers = {request.layer.incarnation for name, request in server.requests if name != "CreateBatchNormLayer"}
    assert layers == {"first"}


def test_lists_are_read_to_their_end(client: Any, server: FakeLayerServer) -> None:
    infos = result_of(client.list_batch_norm_layers("c", scope="net/", collection="tag"))
    assert [info.name for info in infos] == ["a", "b"]
    for request in server.of("ListBatchNormLayers"):
        assert (request.container, request.scope, request.collection) == ("c", "net/", "tag")


def test_updates_of_a_collection(client: Any, server: FakeLayerServer) -> None:
    server.replies["RunBatchNormUpdates"] = {"num_run": 5}
    assert result_of(client.run_updates()) == 5
    assert server.last("RunBatchNormUpdates").collection == layer_pb2.LayerCollectionRef(name="update_ops")
    result_of(client.run_updates("mine", "c"))
    assert server.last("RunBatchNormUpdates").collection == layer_pb2.LayerCollectionRef(name="mine", container="c")
