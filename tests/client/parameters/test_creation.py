"""Finding and creating parameters: what is sent, and what is refused before anything is."""

import asyncio
import math
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format

import gradserve
from gradserve import reductions
from gradserve_protocol.arrays import BFLOAT16
from gradserve_protocol.messages import encode_duration
from gradserve_protocol.v1 import parameters_pb2
from tests.client.parameters.fake_server import FakeParameterServer, aio_client_of, values_in

W = np.arange(6, dtype=np.float32).reshape(2, 3)
SHAPES = {"w": gradserve.DenseSpec("float32", (2, 3))}


def test_values_are_sent_only_if_there_are_none(server: FakeParameterServer, client: gradserve.Client) -> None:
    client.parameters({"w": W}, shared_name="llm")
    client.parameters({"w": W + 1}, shared_name="llm")
    assert [bool(each.values) for each in server.of("CreateParameters")] == [False, True, False]
    assert client.parameters(SHAPES, shared_name="llm").read()["w"].tolist() == W.tolist()
    assert not server.of("CreateParameters")[-1].values


def test_who_has_values_says_so_before_it_sends_them(server: FakeParameterServer, client: gradserve.Client) -> None:
    client.parameters({"w": W}, shared_name="llm")
    asked, sent = server.of("CreateParameters")
    assert asked.creator == sent.creator != ""
    client.parameters({"w": W}, shared_name="llm")
    assert server.of("CreateParameters")[-1].creator not in ("", sent.creator)
    client.parameters(SHAPES, shared_name="llm")
    assert server.of("CreateParameters")[-1].creator == ""


def test_another_creator_may_come_first(server: FakeParameterServer, client: gradserve.Client) -> None:
    client.parameters({"w": W}, shared_name="llm")
    server.failures["CreateParameters"] = [gradserve.NotFoundError("not yet")]
    assert client.parameters({"w": W + 1}, shared_name="llm").read()["w"].tolist() == W.tolist()


@pytest.mark.parametrize("shared_name", ["llm", None])
def test_shapes_alone_create_nothing(
    server: FakeParameterServer, client: gradserve.Client, shared_name: str | None
) -> None:
    with pytest.raises(gradserve.NotFoundError, match="only shapes were given to create them: give values"):
        client.parameters(SHAPES, shared_name=shared_name)
    assert not server.held


class TestByNameAlone:
    """Parameters that are found without values."""

    def test_everything_comes_from_the_server(self, server: FakeParameterServer, client: gradserve.Client) -> None:
        options: dict[str, Any] = {"optimizer": gradserve.optim.Adam(0.1), "num_required": 2, "keep_versions": 7}
        made = client.parameters({"z": {"w": W}, "a": [np.ones(2, BFLOAT16)]}, shared_name="llm", **options)
        num_sent = len(server.of("CreateParameters"))
        found = client.parameters(shared_name="llm")
        assert found.info() == made.info()
        version = found.read()
        assert list(version) == list(version.values) == ["z/w", "a/0"]
        assert (version["a/0"].dtype, version.digest) == (BFLOAT16, made.read().digest)
        assert found.push({"z/w": W, "a/0": None}, version).num_updates == 1
        assert len(server.of("CreateParameters")) == num_sent

    def test_a_single_array(self, client: gradserve.Client) -> None:
        client.parameters(W, shared_name="one")
        found = client.parameters(shared_name="one")
        assert found.push_pull(W, 0).version.values.tolist() == (2 * W).tolist()

    def test_as_many_updates_of_a_worker_as_the_creator_allows(
        self, server: FakeParameterServer, client: gradserve.Client
    ) -> None:
        client.parameters({"w": W}, shared_name="llm", deterministic=True, one_per_worker=False)
        client.parameters(shared_name="llm").push_pull({"w": W}, 0)
        assert server.of("PushPullParameters")[0].worker_id == "", "as default ids differ from run to run"

    def test_with_await(self, server: FakeParameterServer, client: gradserve.Client) -> None:
        client.parameters({"w": W}, shared_name="llm")

        async def read() -> Any:
            async with aio_client_of(server) as other:
                return (await (await other.parameters(shared_name="llm")).read())["w"]

        assert asyncio.run(read()).tolist() == W.tolist()

    def test_there_are_none(self, server: FakeParameterServer, client: gradserve.Client) -> None:
        with pytest.raises(
            gradserve.NotFoundError, match="no parameters 'llm' in container 'default': create"
        ) as raised:
            client.parameters(shared_name="llm")
        assert raised.value.field == "shared_name"
        assert not server.held

    def test_those_of_another_client_are_not_found(self, server: FakeParameterServer, client: gradserve.Client) -> None:
        private = client.parameters({"w": W})
        server.held[private.name].is_private = True
        with pytest.raises(gradserve.NotFoundError, match="private to another client"):
            client.parameters(shared_name=private.name)

    @pytest.mark.parametrize(
        ("arguments", "match"),
        [
            ({}, "values of private parameters, which are always new, or the shared_name"),
            ({"shared_name": "llm", "optimizer": gradserve.optim.Adam()}, "values or shapes with optimizer, got None"),
            ({"shared_name": "llm", "grace": 1.0, "update": "gradient"}, "with grace, update, got None"),
            ({"shared_name": "llm", "idle_lease": 3}, "with idle_lease, got None"),
        ],
    )
    def test_what_only_a_creator_can_say(
        self, server: FakeParameterServer, client: gradserve.Client, arguments: dict[str, Any], match: str
    ) -> None:
        with pytest.raises(gradserve.InvalidArgumentError, match=match) as raised:
            client.parameters(**arguments)
        assert raised.value.field == "values"
        assert not server.requests


def test_private_parameters(server: FakeParameterServer, client: gradserve.Client) -> None:
    parameters = client.parameters({"w": W}, name="mine", idle_lease=3)
    (request,) = server.of("CreateParameters")
    assert parameters.name.startswith("mine-")
    assert request.lifetime.owner_client_id == "me"
    assert request.lifetime.idle_lease == encode_duration(3)
    client.close()
    assert server.of("EndClientLease")


DEFAULTS = """
update: UPDATE_KIND_DELTA
optimizer { sgd { lr: 1 } }
rounds { num_required: 1 grace {} max_grace { seconds: 60 } min_interval {} }
staleness { constant {} }
normalization: NORMALIZATION_WEIGHTS
reduction { mean {} }
keep_versions: 2
keep_rounds: 1000
"""


def test_the_defaults(server: FakeParameterServer, client: gradserve.Client) -> None:
    client.parameters({"w": W}, shared_name="llm")
    spec = server.of("CreateParameters")[-1].spec
    (component,) = spec.components
    assert (component.name, list(component.shape.dims)) == ("w", [2, 3])
    spec.ClearField("components")
    assert spec == text_format.Parse(DEFAULTS, parameters_pb2.ParametersSpec())


RULES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"num_required": 3}, {"num_required": 3}),
    ({"min_required": 1, "deadline": 2.5, "num_required": 2}, {"min_required": 1, "deadline": 2.5, "num_required": 2}),
    ({"expected": 4}, {"expected": 4}),
    ({"expected": "alive"}, {"expected": "alive"}),
    ({"grace": "adaptive", "max_grace": 0}, {"grace": "adaptive", "max_grace": 0.0}),
    ({"grace": 1}, {"grace": 1.0}),
    ({"min_interval": 0.25}, {"min_interval": 0.25}),
]


@pytest.mark.parametrize(("options", "expected"), RULES)
def test_rules_come_back_as_they_were_given(
    client: gradserve.Client, options: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert client.parameters({"w": W}, **options).info().rules == gradserve.RoundRules(**expected)


@pytest.mark.parametrize(
    ("options", "back"),
    [
        ({"update": "gradient", "optimizer": gradserve.optim.SGD(2.0)}, None),
        ({"optimizer": gradserve.optim.AdamW(), "schedule": gradserve.optim.cosine(9, warmup=2)}, None),
        ({"optimizer": gradserve.optim.flower.FedAdam()}, None),
        ({"schedule": gradserve.optim.constant()}, None),
        ({"max_staleness": 7}, None),
        ({"staleness": "inverse_sqrt"}, None),
        ({"staleness": "polynomial(0.25)"}, None),
        ({"staleness": "exponential(0.9)"}, None),
        ({"staleness": "exponential(1)"}, {"staleness": "exponential(1.0)"}),
        ({"staleness": "polynomial(0.5)"}, {"staleness": "inverse_sqrt"}),
        ({"normalize": "count"}, None),
        ({"reduction": "median"}, {"reduction": reductions.median()}),
        ({"reduction": "maximum"}, {"reduction": reductions.maximum()}),
        ({"reduction": "SUM"}, {"reduction": reductions.sum()}),
        ({"reduction": reductions.krum(0, report_only=True)}, None),
        ({"reduction": reductions.krum(2)}, None),
        ({"reduction": reductions.multi_krum(2, 3)}, None),
        ({"reduction": reductions.geometric_median(5, 0.5)}, None),
        ({"clip_norm": 1}, {"clip_norm": 1.0}),
        ({"keep_versions": 5, "keep_rounds": 6}, None),
        ({"deterministic": True, "refuse_non_finite": False, "one_per_worker": False}, None),
        ({"durability": "round", "agreement": {"model": "a"}}, None),
        ({"idle_lease": None}, None),
    ],
)
def test_properties_come_back_as_they_were_given(
    client: gradserve.Client, options: dict[str, Any], back: dict[str, Any] | None
) -> None:
    info = client.parameters({"w": W}, **options).info()
    for name, value in (options if back is None else back).items():
        assert getattr(info, name) == value
    assert info.components == {"w": gradserve.DenseSpec(np.dtype("float32"), (2, 3))}


BAD: list[tuple[str, Any, str]] = [
    ("shared_name", 3, "text"),
    ("name", None, "text"),
    ("container", b"c", "text"),
    ("optimizer", "sgd", "an optimizer of gradserve.optim"),
    ("optimizer", 0.1, "an optimizer of gradserve.optim"),
    ("update", "weights", "'delta' or 'gradient'"),
    ("num_required", 0, "an integer from 1"),
    ("num_required", 1.5, "an integer"),
    ("num_required", 1 << 63, "an integer"),
    ("min_required", 0, "an integer from 1"),
    ("min_required", 2, "at most num_required, 1,"),
    ("min_required", 1, "a deadline, at which so few updates end a round,"),
    ("expected", 0, "an integer from 1"),
    ("expected", "dead", "'alive'"),
    ("grace", "sometimes", "a number of seconds or 'adaptive'"),
    ("grace", -1, "a finite number of seconds"),
    ("grace", math.inf, "a finite number of seconds"),
    ("grace", math.nan, "a finite number of seconds"),
    ("grace", None, "a number"),
    ("max_grace", 1e300, "a finite number of seconds"),
    ("min_interval", -0.1, "a finite number of seconds"),
    ("deadline", 0, "a positive number of seconds"),
    ("deadline", "noon", "a number"),
    ("max_staleness", -1, "an integer from 0"),
    ("staleness", "linear", "polynomial"),
    ("staleness", "polynomial", "polynomial"),
    ("staleness", "polynomial(x)", "polynomial"),
    ("staleness", "polynomial(0)", "a positive exponent"),
    ("staleness", "polynomial(inf)", "a positive exponent"),
    ("staleness", "exponential(0)", "a base above 0"),
    ("staleness", "exponential(1.1)", "a base above 0"),
    ("staleness", "exponential(nan)", "a base above 0"),
    ("staleness", 0.5, "'constant'"),
    ("normalize", "sum", "'weights' or 'count'"),
    ("reduction", "krum", "such as krum(1), or one of 'mean', 'sum'"),
    ("reduction", 3, "a reduction of gradserve.reductions"),
    ("reduction", reductions.Reduction(), "a reduction of gradserve.reductions"),
    ("clip_norm", 0, "a positive number"),
    ("clip_norm", math.inf, "a positive number"),
    ("clip_norm", math.nan, "a positive number"),
    ("schedule", "cosine", "a schedule of gradserve.optim"),
    ("keep_versions", 0, "an integer from 1"),
    ("keep_rounds", 0, "an integer from 1"),
    ("deterministic", "yes", "True or False"),
    ("refuse_non_finite", 2, "True or False"),
    ("one_per_worker", None, "True or False"),
    ("idle_lease", 0, "a positive number of seconds"),
    ("durability", "always", "'none' or 'round' or 'gradient'"),
    ("agreement", {"n": 4}, "text"),
]


@pytest.mark.parametrize(("name", "value", "expected"), BAD)
def test_bad_options(
    server: FakeParameterServer, client: gradserve.Client, name: str, value: Any, expected: str
) -> None:
    arguments = {"shared_name": "llm", name: value}
    with pytest.raises(gradserve.InvalidArgumentError) as raised:
        client.parameters({"w": W}, **arguments)
    assert expected in str(raised.value)
    assert raised.value.field == name
    assert not server.requests


def test_fewer_are_expected_than_required(client: gradserve.Client) -> None:
    with pytest.raises(gradserve.InvalidArgumentError, match="at least num_required, 3,") as raised:
        client.parameters({"w": W}, num_required=3, expected=2)
    assert raised.value.field == "expected"


def test_gradients_need_an_optimizer(client: gradserve.Client) -> None:
    with pytest.raises(gradserve.InvalidArgumentError, match=r"gradserve.optim.SGD\(0.01\)") as raised:
        client.parameters({"w": W}, update="gradient")
    assert raised.value.field == "optimizer"


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: reductions.trimmed_mean(0.5), "fraction"),
        (lambda: reductions.trimmed_mean(-0.1), "fraction"),
        (lambda: reductions.trimmed_mean(math.nan), "fraction"),
        (lambda: reductions.krum(-1), "num_byzantine"),
        (lambda: reductions.krum(1.5), "num_byzantine"),  # type: ignore[arg-type]
        (lambda: reductions.multi_krum(1, 0), "num_selected"),
        (lambda: reductions.geometric_median(0), "max_iterations"),
        (lambda: reductions.geometric_median(tolerance=1), "tolerance"),
        (lambda: reductions.krum(0, report_only="yes"), "report_only"),  # type: ignore[arg-type]
    ],
)
def test_bad_reductions(make: Any, field: str) -> None:
    with pytest.raises(gradserve.InvalidArgumentError) as raised:
        make()
    assert raised.value.field == field


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({}, "at least one array or shape"),
        ({"w": {}}, "at least one array or shape"),
        ({"w": "text"}, "component 'w'"),
        ({"n": np.zeros((), np.int64)}, "got int64; buffers and counters are not parameters"),
        ({"n": 3}, "got int64"),
        ({"n": np.zeros(2, np.complex64)}, "got complex64"),
        ({"w": gradserve.SparseSpec("float32", (2, 3))}, "a dense array or shape"),
        ({"w": gradserve.IndexedSlices(W, np.arange(2), (9, 3))}, "a dense array or shape"),
        ({"w": gradserve.DenseSpec("float32")}, "a shape with known sizes"),
        ({"w": gradserve.DenseSpec("float32", (None, 2))}, "a shape with known sizes"),
        ({"w": W, "b": gradserve.DenseSpec("float32", ())}, "values of all components, or shapes alone"),
        ({1.5: W}, "names as keys"),
        ({"a": {"b": W}, "a/b": W}, "two values named 'a/b'"),
    ],
)
def test_bad_values(server: FakeParameterServer, client: gradserve.Client, values: Any, match: str) -> None:
    with pytest.raises(gradserve.InvalidArgumentError, match=match) as raised:
        client.parameters(values, shared_name="llm")
    assert raised.value.field == "values"
    assert not server.requests


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_dtypes(server: FakeParameterServer, client: gradserve.Client, dtype: str) -> None:
    value = np.ones((2, 1), BFLOAT16 if dtype == "bfloat16" else dtype)
    read = client.parameters({"w": value}, shared_name="llm").read()["w"]
    assert (read.dtype, read.tolist()) == (value.dtype, [[1.0], [1.0]])
    assert values_in(server.of("CreateParameters")[-1].values)["w"].dtype == value.dtype


def test_handles_stay_the_callers(server: FakeParameterServer, client: gradserve.Client) -> None:
    handle = gradserve.TensorHandle("stored", np.dtype(np.float32), (2, 3))
    server.failures["CreateParameters"] = [gradserve.NotFoundError(""), gradserve.NotFoundError("no such tensor")]
    with pytest.raises(gradserve.NotFoundError, match="no such tensor"):
        client.parameters({"w": handle}, shared_name="llm")
    request = server.of("CreateParameters")[-1]
    assert request.values[0].dense.handle == "stored"
    assert not request.release_handles


@pytest.mark.exhaustive
class TestPyTorch:
    """Models of PyTorch; skipped without it."""

    @pytest.fixture(autouse=True)
    def _with_pytorch(self) -> None:
        self.torch = pytest.importorskip("torch", reason="not installed: make install-frameworks")

    def test_a_state_dict_of_any_dtype(self, client: gradserve.Client) -> None:
        model = self.torch.nn.Linear(3, 2, dtype=self.torch.bfloat16)
        parameters = client.parameters(model.state_dict(), shared_name="llm")
        version = parameters.read()
        assert list(version) == ["weight", "bias"]
        assert version["weight"].astype(np.float32).tolist() == model.weight.float().tolist()
        on_meta = self.torch.nn.Linear(3, 2, dtype=self.torch.bfloat16, device="meta").state_dict()
        assert client.parameters(on_meta, shared_name="llm").read().digest == version.digest

    def tied(self) -> Any:
        first, second = self.torch.nn.Embedding(4, 2), self.torch.nn.Linear(2, 4, bias=False)
        second.weight = first.weight
        return self.torch.nn.ModuleDict({"first": first, "second": second})

    def test_tied_tensors_travel_once(self, server: FakeParameterServer, client: gradserve.Client) -> None:
        model = self.tied()
        parameters = client.parameters(model.state_dict(), shared_name="llm")
        version = parameters.read()
        assert [each.name for each in server.held["llm"].spec.components] == ["first.weight"]
        assert list(version) == ["first.weight", "second.weight"]
        assert version["first.weight"] is version["second.weight"]
        model.load_state_dict({name: self.torch.from_numpy(each) for name, each in version.items()})

    def test_updates_of_tied_tensors(self, server: FakeParameterServer, client: gradserve.Client) -> None:
        parameters = client.parameters(self.tied().state_dict(), shared_name="llm")
        one = np.full((4, 2), 1, np.float32)
        both = {"first.weight": one, "second.weight": one.copy()}
        for update in ({"first.weight": one}, {"second.weight": one}, both, {"first.weight": None, **both}):
            parameters.push(update, parameters.read())
        assert [list(values_in(each.update)) for each in server.of("Push")] == [["first.weight"]] * 4
        with pytest.raises(gradserve.InvalidArgumentError, match="one tensor, got two") as raised:
            parameters.push({"first.weight": one, "second.weight": 2 * one}, 4)
        assert raised.value.field == "update"

    def test_buffers_are_refused_by_name(self, client: gradserve.Client) -> None:
        state = self.torch.nn.BatchNorm1d(2).state_dict()
        with pytest.raises(gradserve.InvalidArgumentError, match=r"'num_batches_tracked'.*named_parameters"):
            client.parameters(state, shared_name="llm")


def test_the_same_array_under_two_names_is_two_components(client: gradserve.Client) -> None:
    """Zeros may stand for two parameters, as arrays of JAX always may."""
    assert list(client.parameters({"a": W, "b": W}).info().components) == ["a", "b"]
