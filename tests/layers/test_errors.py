"""What the layer refuses: what TensorFlow refuses, in its words, and the few things in which they differ."""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

import gradserve
from gradserve_protocol.v1 import batch_norm_layer_messages_pb2 as messages_pb2
from gradserve_protocol.v1 import batch_norm_layer_pb2 as batch_norm_pb2
from gradserve_protocol.v1 import server_messages_pb2
from gradserve_server.config import ServerConfig
from gradserve_testing import LocalServer
from tests.golden.batch_norm_layer_errors import LayerCall, Refusal, load_refusals, load_taken
from tests.servers.raw_calls import RawCalls
from tests.servers.runtime import NOT_WARMED_UP

INVALID, NOT_FOUND, EXISTS = gradserve.InvalidArgumentError, gradserve.NotFoundError, gradserve.AlreadyExistsError

WORDS = {
    # What TensorFlow's text says, as far as it is about the call and not about graphs.
    "data_format has to be either NCHW or NHWC.": INVALID,
    "renorm is not supported with batch_weights, updates_collections or zero_debias_moving_mean": INVALID,
    "Received invalid keys for `renorm_clipping` argument: ": INVALID,
    "Supported values: ['rmax', 'rmin', 'dmax'].": INVALID,
    "reuse=True cannot be used without a name_or_scope": INVALID,
    "Variable layer/beta does not exist": NOT_FOUND,
    "Variable layer/beta already exists, disallowed": EXISTS,
    "Too many elements provided. Takes": INVALID,
    "Setting a scale less than 0 on a regularizer: -0.5": INVALID,
    "Value passed to parameter 'x' has DataType float64 not in list of allowed values: float16, ": INVALID,
}
WHOLE = ("Shapes (", "Trying to share variable layer/beta, but specified ")
"""Texts that are used as they are begin so; all of them are of InvalidArgumentError."""

RANKS, DTYPES = "expected a rank from 2 to 5, got shape", "expected a dtype out of half, bfloat16, float, double, got"
BROADCAST = "expected a shape that broadcasts to that of the inputs, ["
OTHER_WORDS = {
    # TensorFlow's are about axes, nodes of the graph, or single variables.
    "rank 0": (INVALID, RANKS),
    "rank 0, NCHW": (INVALID, RANKS),
    "rank 0, unfused": (INVALID, RANKS),
    "rank 1, NCHW": (INVALID, RANKS),
    "int32 of rank 2": (INVALID, f"{DTYPES} int32"),
    "int32 of rank 3": (INVALID, f"{DTYPES} int32"),
    "int32 of rank 4": (INVALID, f"{DTYPES} int32"),
    "int32, legacy": (INVALID, f"{DTYPES} int32"),
    "bool of rank 2": (INVALID, f"{DTYPES} bool"),
    "bool of rank 3": (INVALID, f"{DTYPES} bool"),
    "bool of rank 4": (INVALID, f"{DTYPES} bool"),
    "adjustment of a wrong shape": (INVALID, f"{BROADCAST}5, 3], got [4]"),
    "adjustment larger than x": (INVALID, f"{BROADCAST}1, 3], got [5, 3]"),
    "adjustment of more dimensions than x": (INVALID, f"{BROADCAST}5, 3], got [1, 5, 3]"),
    # Layers of one name have equal configurations, so the configuration is what is wrong.
    "reuse with a scale that is not": (EXISTS, "another configuration: scale is False, not True"),
    "reuse with renorm that is not": (EXISTS, "another configuration: renorm is False, not True"),
    "reuse with zero_debias that is not": (EXISTS, "configuration: zero_debias_moving_mean is False, not True"),
}

TAKEN_HERE = {
    "float64 with renorm": "TensorFlow means to take it, and mixes up its own dtypes",
    "float64 adjustment of float32": "any floating dtype is converted",
    "float16 adjustment of float16": "any floating dtype is converted",
    "scale of a regularizer that is an integer": "a message has doubles only",
    "scope with a space": "any name but the empty one",
    "scope that starts with an underscore": "any name but the empty one",
    "scope that exists": "reuse=None: a service finds what another client made",
    "scope that exists, rank 3": "as above",
    "scope that exists, rank 4": "as above",
    "scope that exists, legacy": "as above",
}

REFUSED_HERE = {
    # No axes to take moments over.
    "rank 1": (INVALID, RANKS),
    "rank 1, unfused": (INVALID, RANKS),
    "rank 1, legacy": (INVALID, RANKS),
    "rank 0, legacy": (INVALID, RANKS),
    # No dtype or rank that TensorFlow documents.
    "rank 6": (INVALID, RANKS),
    "rank 6, legacy, NCHW": (INVALID, RANKS),
    "complex64 of rank 3": (INVALID, f"{DTYPES} complex64"),
    "batch_weights that are complex": (INVALID, "expected a floating dtype, integers or bool, got complex64"),
    # TensorFlow fills up with the last one: never meant so.
    "initializer with too few elements": (INVALID, "Too few elements provided. Takes 3, as there are 3 channels"),
    "initializer with one element": (INVALID, "Too few elements provided. Takes 3, as there are 3 channels"),
    "initializer of rank 2": (INVALID, "expected real numbers of shape [C] or [], got float32 of shape [1, 3]"),
    # Wrong whether looked at or not.
    "adjustment of a wrong shape in inference": (INVALID, f"{BROADCAST}5, 3], got [4]"),
    # Averages that run away.
    "decay above 1": (INVALID, "expected a decay from 0 to 1, got 1.5"),
    "negative decay": (INVALID, "expected a decay from 0 to 1, got -0.5"),
    # One name, one configuration.
    "reuse without the center that is": (EXISTS, "another configuration: center is True, not False"),
    "empty scope": (INVALID, "expected the name of a layer, got an empty one"),
}

OURS = [
    # What TensorFlow has as Python objects has names here: the message lists them.
    (
        {"activation_fn": "rleu"},
        '"relu", "relu6", "tanh", "sigmoid", "elu", "selu", "softplus", "softsign", "leaky_relu", "gelu", "swish"',
    ),
    (
        {"param_initializers": {"beta": gradserve.Initializer("orthogonal")}},
        "zeros, ones, constant, uniform, normal, truncated_normal, glorot, glorot_normal",
    ),
    ({"param_regularizers": {"gamma": gradserve.Regularizer("l3", l1=1.0)}}, "l1, l2, l1_l2"),
    ({"param_regularizers": {"gamma": gradserve.Regularizer("l1", l2=1.0)}}, "l1 has no scale l2; it takes l1"),
    (
        {"param_regularizers": {"gamma": gradserve.Regularizer("l2")}},
        "expected a scale l2 for the regularizer l2, got none",
    ),
    ({"param_initializers": {"beta": gradserve.Initializer("normal", value=1)}}, "it takes mean, stddev"),
    ({"param_initializers": {"beta": gradserve.Initializer("zeros", seed=1)}}, "zeros is not random and takes no seed"),
    ({"param_initializers": {"beta": gradserve.Initializer("normal", stddev=-1)}}, "a stddev of at least 0, got -1"),
    ({"param_initializers": {"beta": gradserve.Initializer("uniform", minval=3)}}, "minval <= maxval, got 3 and 1"),
    ({"decay": 1.0, "zero_debias_moving_mean": True}, "divides by 1 - decay^n: expected a decay below 1"),
    ({"renorm_decay": -0.1}, "expected a renorm_decay from 0 to 1, got -0.1"),
    ({"decay": float("nan")}, "expected a decay from 0 to 1, got nan"),
    ({"epsilon": float("inf")}, "expected a finite epsilon, got inf"),
    ({"renorm": True, "renorm_clipping": {"rmax": float("nan")}}, "expected a number as rmax, got nan"),
    ({"adjustment": gradserve.RandomAdjustment((1.0, 0.9), (0.0, 0.0))}, "scale_min <= scale_max, got 1.0 and 0.9"),
    ({"data_format": "NHWC "}, "data_format has to be either NCHW or NHWC. Got 'NHWC '"),
]


@pytest.fixture(scope="module")
def server_address(_compiled_kernels: None) -> Iterator[str]:
    """A server of this file alone, as its use is compared: what others have left on a shared one ends at any time."""
    with LocalServer(ServerConfig(runtime=NOT_WARMED_UP)) as local:
        local.wait_until_prepared()  # loading kernels changes the filters of warnings for a moment
        yield local.address


@pytest.fixture(scope="module")
def raw(server_address: str) -> Iterator[RawCalls]:
    with RawCalls(server_address) as calls:
        yield calls


@dataclass
class Attempt:
    """A call of a layer: it is created or found, then it computes."""

    client: gradserve.Client
    raw: RawCalls
    container: str

    def state(self) -> Any:
        """Returns all layers as described, and what of the server is used."""
        layers = self.raw.call("ListBatchNormLayers", messages_pb2.ListBatchNormLayersRequest(container=self.container))
        return layers, self.raw.call("GetServerInfo", server_messages_pb2.GetServerInfoRequest()).usage

    def make(self, call: LayerCall) -> None:
        """Leaves everything as it was unless it succeeds."""
        arguments = dict(call.arguments)
        regularizers = arguments.get("param_regularizers", {})
        arguments["param_regularizers"] = {
            name: gradserve.Regularizer(value["regularizer"][0], **value["regularizer"][1])
            for name, value in regularizers.items()
        }
        before = self.state()
        try:
            bn = self.client.batch_norm(container=self.container, **arguments)
            before = self.state()
            bn.forward(call.x, call.is_training, call.batch_weights, call.adjustment)
        except gradserve.GradserveError:
            assert self.state() == before
            raise


@pytest.fixture
def attempt(client: gradserve.Client, raw: RawCalls, name: str) -> Iterator[Attempt]:
    # TensorFlow ignores in silence what makes gradserve warn.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", gradserve.IgnoredArgumentWarning)
        yield Attempt(client, raw, name)
    for layer in client.list_batch_norm_layers(container=name):
        ref = batch_norm_pb2.BatchNormLayerRef(container=name, name=layer.name)
        raw.call("DeleteBatchNormLayer", messages_pb2.DeleteBatchNormLayerRequest(layer=ref))


def must_refuse(attempt: Attempt, refusal: Refusal, error: type[Exception], *texts: str) -> None:
    *earlier, last = refusal.calls
    for call in earlier:
        attempt.make(call)
    with pytest.raises(error) as refused:
        attempt.make(last)
    for text in texts:
        assert text in str(refused.value)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("refusal", [each for each in load_refusals() if each.name not in TAKEN_HERE], ids=str)
def test_what_tensorflow_refuses(attempt: Attempt, refusal: Refusal) -> None:
    if refusal.name in OTHER_WORDS:
        error, text = OTHER_WORDS[refusal.name]
        must_refuse(attempt, refusal, error, text)
    elif refusal.text.startswith(WHOLE):
        must_refuse(attempt, refusal, INVALID, refusal.text.rstrip("."))
    else:
        texts = [text for text in WORDS if text in refusal.text]
        assert texts
        must_refuse(attempt, refusal, WORDS[texts[0]], *texts)


@pytest.mark.parametrize("taken", [each for each in load_taken() if each.name not in REFUSED_HERE], ids=str)
def test_what_tensorflow_takes(attempt: Attempt, taken: Refusal) -> None:
    for call in taken.calls:
        attempt.make(call)


@pytest.mark.parametrize("name_of_call", sorted(TAKEN_HERE))
def test_what_only_gradserve_takes(attempt: Attempt, name_of_call: str) -> None:
    (refusal,) = (each for each in load_refusals() if each.name == name_of_call)
    for call in refusal.calls:
        attempt.make(call)


@pytest.mark.parametrize("name_of_call", sorted(REFUSED_HERE))
def test_what_only_gradserve_refuses(attempt: Attempt, name_of_call: str) -> None:
    (taken,) = (each for each in load_taken() if each.name == name_of_call)
    error, text = REFUSED_HERE[name_of_call]
    must_refuse(attempt, taken, error, text)


@pytest.mark.parametrize(("arguments", "message"), OURS, ids=str)
def test_arguments_that_cannot_be(attempt: Attempt, arguments: dict[str, Any], message: str) -> None:
    before = attempt.state()
    with pytest.raises(INVALID) as refused:
        attempt.client.batch_norm(container=attempt.container, **arguments)
    assert message in str(refused.value)
    assert str(refused.value.field).split(".")[1].partition("[")[0] in arguments
    assert attempt.state() == before


def test_a_layer_that_draws_its_adjustment_takes_no_other(attempt: Attempt) -> None:
    bn = attempt.client.batch_norm(
        container=attempt.container, adjustment=gradserve.RandomAdjustment((0.9, 1.1), (0.0, 0.0))
    )
    before = attempt.state()
    with pytest.raises(INVALID, match="expected no adjustment, as the layer draws one itself"):
        bn.forward([[1.0, 2.0]], adjustment=([1.0], [0.0]))
    assert attempt.state() == before
