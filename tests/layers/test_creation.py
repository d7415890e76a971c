"""How a layer comes to be: found or made, with which first values; and how its variables are set."""

import asyncio
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gradserve_server.errors import AlreadyExistsError, InvalidArgumentError, NotFoundError
from gradserve_server.layers.batch_norm.config import BatchNormConfig, RandomAdjustment
from gradserve_server.layers.batch_norm.layer import BatchNormLayer
from gradserve_server.layers.batch_norm.registry import Reuse
from gradserve_server.layers.variables import NamedInitializer, Regularizer
from gradserve_server.resources.registry import ResourceKey
from tests.layers.bench import KEY, LayerBench, config_of, forward, run_updates

NORMAL, SEEDED = NamedInitializer("normal", {}), NamedInitializer("normal", {}, seed=5)
L2 = Regularizer("l2", {"l2": 0.5})
MANY = 20_000


def create(
    bench: LayerBench, reuse: Reuse = Reuse.ALLOWED, creation_id: str = "", **arguments: Any
) -> tuple[BatchNormLayer, bool]:
    return bench.registry.create(KEY, config_of(**arguments), reuse, creation_id)


def variables(channels: int = 3, dtype: Any = np.float32, **arguments: Any) -> Mapping[str, Any]:
    layer = LayerBench().layer(**arguments)
    asyncio.run(layer.build(np.dtype(dtype), (-1, 2, channels)))
    return layer.get_variables(())


class TestReuse:
    def test_one_that_may_exist_is_found(self) -> None:
        bench = LayerBench()
        first, created = create(bench)
        assert created
        assert create(bench) == create(bench, Reuse.REQUIRED) == (first, False)
        assert bench.registry.count.used == 1

    def test_one_that_must_exist(self) -> None:
        with pytest.raises(NotFoundError, match="Variable layer/beta does not exist"):
            create(LayerBench(), Reuse.REQUIRED)

    @pytest.mark.parametrize("arguments", [{}, {"decay": 0.5}], ids=["equal", "other"])
    @pytest.mark.parametrize("creation_id", ["", "other"])
    def test_one_that_must_not(self, creation_id: str, arguments: dict[str, Any]) -> None:
        bench = LayerBench()
        create(bench, Reuse.FORBIDDEN, "mine")
        with pytest.raises(AlreadyExistsError, match="Variable layer/beta already exists, disallowed"):
            create(bench, Reuse.FORBIDDEN, creation_id, **arguments)

    def test_a_retry_of_its_creation_finds_it(self) -> None:
        bench = LayerBench()
        made = create(bench, Reuse.FORBIDDEN, "mine", param_initializers={"beta": NORMAL})
        assert create(bench, Reuse.FORBIDDEN, "mine", param_initializers={"beta": NORMAL}) == (made[0], False)
        with pytest.raises(AlreadyExistsError, match="another configuration"):
            create(bench, Reuse.FORBIDDEN, "mine")

    def test_one_deleted_is_made_anew(self) -> None:
        bench = LayerBench()
        first, _ = create(bench)
        forward(first, np.ones((2, 3), np.float32))
        assert bench.registry.delete(KEY)
        assert not bench.registry.delete(KEY)
        second, created = create(bench, Reuse.FORBIDDEN, decay=0.5)
        assert created
        assert second.variables is None
        assert first.incarnation != second.incarnation
        assert not bench.registry.delete(KEY, first.incarnation)
        with pytest.raises(NotFoundError):
            bench.registry.get(KEY, first.incarnation)

    @pytest.mark.parametrize(("container", "name"), [("test", "layer/sub"), ("other", "layer"), ("test", "Layer")])
    def test_names_are_their_own(self, container: str, name: str) -> None:
        bench = LayerBench()
        assert bench.layer(ResourceKey(container, name)) is not bench.layer()

    def test_what_cannot_be_is_refused_though_one_exists(self) -> None:
        bench = LayerBench()
        create(bench)
        with pytest.raises(InvalidArgumentError, match="expected a decay from 0 to 1"):
            create(bench, decay=3.0)


OTHERS: list[dict[str, Any]] = [
    {"decay": 0.9},
    {"center": False},
    {"scale": True},
    {"epsilon": 0.1},
    {"activation_fn": "relu"},
    {"param_initializers": {"beta": np.ones(3)}},
    {"param_initializers": {"beta": NamedInitializer("ones", {})}},
    {"param_regularizers": {"beta": L2}},
    {"updates_collections": "mine"},
    {"variables_collections": {"": ("a",)}},
    {"outputs_collections": ("a",)},
    {"trainable": False},
    {"fused": True},
    {"data_format": "NCHW"},
    {"zero_debias_moving_mean": True},
    {"renorm": True},
    {"renorm_clipping": {"rmax": 2.0}},
    {"renorm_decay": 0.5},
    {"adjustment": RandomAdjustment((1, 1), (0, 0), 1)},
    {"renorm_zero_debias": True},
]


@pytest.mark.parametrize("other", OTHERS, ids=str)
def test_another_configuration_is_refused_and_named(other: dict[str, Any]) -> None:
    bench = LayerBench()
    create(bench)
    (argument,) = other
    with pytest.raises(AlreadyExistsError, match=rf"with another configuration: {argument}(\[\w*\])? is [^;]*$"):
        create(bench, **other)
    create(LayerBench(), **other)


def test_every_argument_is_compared() -> None:
    compared = {argument for other in OTHERS for argument in other} | {"in_place_updates", "durability"}
    assert compared == set(BatchNormConfig.__dataclass_fields__)
    bench = LayerBench()
    create(bench)
    with pytest.raises(AlreadyExistsError, match="in_place_updates is False, not True; updates_collections is"):
        create(bench, updates_collections=None)


UNIFORM = NamedInitializer("uniform", {"minval": -1.0}, seed=1)
DIFFERENCES: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"decay": 0.9}, {"decay": 0.99}, "decay is 0.9, not 0.99"),
    ({"fused": True}, {}, "fused is True, not unset"),
    ({"activation_fn": "relu"}, {}, "activation_fn is relu, not none"),
    ({"adjustment": RandomAdjustment((0, 1), (0, 1), 1)}, {}, "adjustment is random, not unset"),
    (
        {"adjustment": RandomAdjustment((0, 1), (0, 1), 1)},
        {"adjustment": RandomAdjustment((0, 2), (0, 1), 2)},
        "adjustment.scale is [0, 1], not [0, 2]; adjustment.seed is 1, not 2",
    ),
    (
        {"param_initializers": {"beta": np.ones(3), "gamma": np.ones(3)}},
        {"param_initializers": {"beta": np.zeros(3), "gamma": np.ones(3)}},
        "param_initializers[beta] is a tensor of shape [3], not one of other values",
    ),
    (
        {"param_initializers": {"beta": UNIFORM, "gamma": np.ones(4)}},
        {"param_initializers": {"beta": replace(UNIFORM, seed=2), "moving_mean": NamedInitializer("ones", {})}},
        "param_initializers[beta] is uniform with minval -1 and seed 1, not uniform with minval -1 and seed 2; "
        "param_initializers[gamma] is a tensor of shape [4], not unset; "
        "param_initializers[moving_mean] is unset, not ones",
    ),
    ({"param_regularizers": {"beta": L2}}, {}, "param_regularizers[beta] is l2 with l2 0.5, not unset"),
    ({"renorm_clipping": {"rmax": 2.0}}, {"renorm_clipping": {"rmax": 3.0}}, "renorm_clipping[rmax] is 2, not 3"),
    ({"outputs_collections": ("a", "b")}, {}, "outputs_collections is [a, b], not []"),
    ({"variables_collections": {"": ("a",)}}, {}, "variables_collections[] is [a], not unset"),
    ({}, {"updates_collections": "u"}, "updates_collections is [update_ops], not [u]"),
]


@pytest.mark.parametrize(("one", "other", "words"), DIFFERENCES, ids=[words for _, _, words in DIFFERENCES])
def test_differences_are_said_entry_by_entry(one: dict[str, Any], other: dict[str, Any], words: str) -> None:
    bench = LayerBench()
    create(bench, **one)
    with pytest.raises(AlreadyExistsError) as error:
        create(bench, **other)
    assert error.value.message == f"layer 'test/layer' exists with another configuration: {words}"


def test_many_differences_are_cut_short() -> None:
    bench, long = LayerBench(), "é" * 512
    create(bench, outputs_collections=tuple(f"{number}{long[:500]}" for number in range(100)))
    with pytest.raises(AlreadyExistsError, match=r"outputs_collections is \[0é+.* \.\.\.$") as error:
        create(bench, outputs_collections=(long,))
    assert 900 < len(error.value.message.encode()) < 1200


SAME: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"outputs_collections": ("a", "b")}, {"outputs_collections": ("b", "a", "b")}),
    ({"variables_collections": {"": ("a", "b")}}, {"variables_collections": {"": ("b", "a")}}),
    ({"activation_fn": "none"}, {"activation_fn": ""}),
    ({"param_initializers": {"beta": np.full(3, np.nan)}}, {"param_initializers": {"beta": np.full(3, np.nan)}}),
]


@pytest.mark.parametrize(("one", "other"), SAME, ids=str)
def test_what_means_the_same_is_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    bench = LayerBench()
    made, _ = create(bench, **one)
    assert create(bench, **other) == (made, False)
    assert config_of(**one) == config_of(**other)


def test_updates_collections_are_a_set() -> None:
    bench = LayerBench()
    one, other = (BatchNormConfig(updates_collections=tags) for tags in (("b", "a", "a"), ("a", "b")))
    made, _ = bench.registry.create(KEY, one, Reuse.ALLOWED, "")
    assert bench.registry.create(KEY, other, Reuse.ALLOWED, "") == (made, False)
    assert BatchNormConfig(updates_collections=("update_ops", "update_ops")).has_default_updates


def test_an_activation_of_none_is_the_identity() -> None:
    x = np.array([[-1.0, 0], [1, 2]], np.float32)
    outputs = [forward(LayerBench().layer(activation_fn=name), x).outputs for name in ("none", "")]
    np.testing.assert_array_equal(*outputs)
    assert outputs[0].min() < 0


LONG = "é" * 512 + "x"  # 1025 bytes
UNIFORM_OVERFLOW = NamedInitializer("uniform", {"minval": -1e308, "maxval": 1.7e308})
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    (
        {"param_initializers": {"beta": UNIFORM_OVERFLOW}},
        "expected a finite difference of minval and maxval, got -1e+308 and 1.7e+308",
        "config.param_initializers[beta].named.minval",
    ),
    (
        {"adjustment": RandomAdjustment((-1e308, 1.7e308), (0, 0))},
        "expected a finite difference of scale_min and scale_max, got -1e+308 and 1.7e+308",
        "config.adjustment.scale_min",
    ),
    (
        {"adjustment": RandomAdjustment((0, 0), (-1e308, 1.7e308))},
        "expected a finite difference of bias_min and bias_max, got -1e+308 and 1.7e+308",
        "config.adjustment.bias_min",
    ),
    ({"renorm_clipping": {"rmax": math.nan}}, "expected a number as rmax, got nan", "config.renorm_clipping[rmax]"),
    (
        {"param_regularizers": {"gamma": Regularizer("l1", {})}},
        "expected a scale l1 for the regularizer l1, got none",
        "config.param_regularizers[gamma]",
    ),
    *[
        ({argument: {str(number): value for number in range(65)}}, "expected at most 64 entries, got 65", field)
        for argument, value, field in (
            ("param_initializers", SEEDED, "config.param_initializers"),
            ("param_regularizers", L2, "config.param_regularizers"),
        )
    ],
    *[
        ({argument: {LONG: value}}, "expected names of at most 1024 bytes, got one of 1025", f"config.{argument}")
        for argument, value in (
            ("param_initializers", SEEDED),
            ("param_regularizers", L2),
            ("variables_collections", ("a",)),
            ("renorm_clipping", 1.0),
        )
    ],
    *[
        ({argument: value}, message, f"config.{argument}")
        for tag, message in (
            ("", "expected the name of a collection, got an empty one"),
            (LONG, "expected names of at most 1024 bytes, got one of 1025"),
        )
        for argument, value in (
            ("updates_collections", tag),
            ("outputs_collections", ("a", tag)),
            ("variables_collections", {"beta": ("a", tag)}),
        )
    ],
    (
        {"variables_collections": {name: tuple(map(str, range(600))) for name in ("beta", "gamma")}},
        "expected at most 1024 collections in all, got 1201",
        "config.variables_collections",
    ),
]


@pytest.mark.parametrize(("arguments", "message", "field"), REFUSED, ids=[f"{f}: {m}" for _, m, f in REFUSED])
def test_what_cannot_be_is_refused(arguments: dict[str, Any], message: str, field: str) -> None:
    bench = LayerBench()
    with pytest.raises(InvalidArgumentError) as error:
        create(bench, **arguments)
    assert (error.value.message, error.value.field) == (message, field)
    assert (bench.registry.count.used, bench.memory.used) == (0, 0)


@pytest.mark.parametrize(
    ("key", "creation_id", "message", "field"),
    [
        (ResourceKey("c", LONG), "", "expected at most 1024 bytes, got 1025", "layer.name"),
        (ResourceKey(LONG, "n"), "", "expected at most 1024 bytes, got 1025", "layer.container"),
        (ResourceKey("c", "n"), LONG[-65:], "expected at most 128 bytes, got 129", "creation_id"),
    ],
    ids=["name", "container", "creation_id"],
)
def test_names_have_limits(key: ResourceKey, creation_id: str, message: str, field: str) -> None:
    bench = LayerBench()
    built = (np.dtype(np.float32), (-1, 3))
    makes: list[Callable[[], object]] = [
        lambda: bench.registry.create(key, config_of(), Reuse.ALLOWED, creation_id),
        lambda: asyncio.run(bench.registry.create_built(key, config_of(), Reuse.ALLOWED, creation_id, *built)),
    ]
    for make in makes:
        with pytest.raises(InvalidArgumentError) as error:
            make()
        assert (error.value.message, error.value.field) == (message, field)
    assert bench.registry.count.used == 0
    bench.registry.create(ResourceKey(LONG[:-1], LONG[:-1]), config_of(), Reuse.ALLOWED, LONG[:64])


class TestSeeds:
    @pytest.mark.parametrize("asked", [NORMAL, replace(NORMAL, seed=7)], ids=["none", "the one drawn"])
    def test_one_that_was_not_given_matches_any(self, asked: NamedInitializer) -> None:
        bench = LayerBench()  # draws 7
        made, _ = create(bench, param_initializers={"beta": NORMAL})
        assert create(bench, param_initializers={"beta": asked}) == (made, False)
        with pytest.raises(AlreadyExistsError, match="param_initializers"):
            create(bench, param_initializers={"beta": SEEDED})

    def test_of_an_adjustment(self) -> None:
        bench, drawing = LayerBench(), RandomAdjustment((0, 1), (0, 1))
        made, _ = create(bench, adjustment=drawing)
        assert made.config.adjustment == replace(drawing, seed=7)
        assert create(bench, adjustment=drawing) == create(bench, adjustment=made.config.adjustment) == (made, False)
        with pytest.raises(AlreadyExistsError, match="adjustment"):
            create(bench, adjustment=replace(drawing, seed=8))

    def test_one_of_another_kind_does_not_match(self) -> None:
        bench = LayerBench()
        create(bench, param_initializers={"beta": NORMAL})
        for other in (NamedInitializer("uniform", {}), NamedInitializer("normal", {"mean": 1.0}), np.ones(3)):
            with pytest.raises(AlreadyExistsError, match="param_initializers"):
                create(bench, param_initializers={"beta": other})


def drawn(name: str, seed: int = 1, channels: int = MANY, /, **parameters: float) -> np.ndarray:
    initializer = NamedInitializer(name, parameters, seed)
    value: np.ndarray = variables(channels, np.float64, fused=False, param_initializers={"beta": initializer})["beta"]
    return value


GLOROT = math.sqrt(3 / MANY)
GLOROT_NORMAL = 2 * math.sqrt(1 / MANY) / 0.87962566103423978


class TestRandomInitializers:
    @pytest.mark.parametrize("name", ["uniform", "normal", "truncated_normal", "glorot", "glorot_normal"])
    def test_the_seed_decides(self, name: str) -> None:
        np.testing.assert_array_equal(drawn(name, 1, 50), drawn(name, 1, 50))
        assert not np.array_equal(drawn(name, 1, 50), drawn(name, 2, 50))

    @pytest.mark.parametrize(
        ("name", "parameters", "low", "high", "mean", "stddev"),
        [
            ("uniform", {}, 0, 1, 0.5, 12**-0.5),
            ("uniform", {"minval": -4.0, "maxval": -1.0}, -4, -1, -2.5, 3 * 12**-0.5),
            ("normal", {}, -6, 6, 0, 1),
            ("normal", {"mean": 5.0, "stddev": 0.1}, 4, 6, 5, 0.1),
            ("truncated_normal", {}, -2, 2, 0, 0.87962566103423978),
            ("truncated_normal", {"mean": 3.0, "stddev": 2.0}, -1, 7, 3, 2 * 0.87962566103423978),
            ("glorot", {}, -GLOROT, GLOROT, 0, math.sqrt(1 / MANY)),
            ("glorot_normal", {}, -GLOROT_NORMAL, GLOROT_NORMAL, 0, math.sqrt(1 / MANY)),
        ],
    )
    def test_the_distribution(
        self, name: str, parameters: dict[str, float], low: float, high: float, mean: float, stddev: float
    ) -> None:
        """Bounds are strict; five standard errors for the moments."""
        value = drawn(name, **parameters)
        assert low <= value.min()
        assert value.max() <= high
        if name != "normal":
            # So close to the bounds that they are no wider than these.
            assert value.min() < low + (high - low) / 100
            assert value.max() > high - (high - low) / 100
        assert abs(value.mean() - mean) < 5 * stddev / math.sqrt(MANY)
        assert abs(value.std() - stddev) < 5 * stddev / math.sqrt(MANY)

    @pytest.mark.parametrize(
        ("name", "parameters"),
        [
            ("normal", {"stddev": 1.7e308}),
            ("truncated_normal", {"mean": 1.7e308, "stddev": 1.7e308}),
            ("uniform", {"minval": -8e307, "maxval": 8e307}),
            ("constant", {"value": 1e300}),
        ],
    )
    @pytest.mark.parametrize("dtype", [np.float32, np.float64])
    def test_values_too_large_for_the_dtype_are_infinite(
        self, name: str, parameters: dict[str, float], dtype: Any
    ) -> None:
        initializer = NamedInitializer(name, parameters, None if name == "constant" else 1)
        value = variables(1000, dtype, fused=False, param_initializers={"beta": initializer})["beta"]
        assert not np.isnan(value).any()
        assert np.isinf(value).all() if dtype is np.float32 else np.abs(value).max() >= 1e300

    def test_a_spread_of_zero(self) -> None:
        assert set(drawn("normal", mean=3.0, stddev=0.0)) == set(drawn("uniform", minval=3.0, maxval=3.0)) == {3.0}


class TestFirstValues:
    def test_defaults(self) -> None:
        found = variables(scale=True, zero_debias_moving_mean=True, fused=False)
        expected = {"beta": 0, "gamma": 1, "moving_mean": 0, "moving_variance": 1, "moving_mean/biased": 0}
        assert {name: set(value.ravel()) for name, value in found.items()} == {
            **{name: {value} for name, value in expected.items()},
            "moving_mean/local_step": {0},
        }
        assert found["moving_mean/local_step"].shape == ()

    def test_of_renorm_follow_from_the_moving_averages(self) -> None:
        given = {"moving_mean": np.array([1.0, 2, 3]), "moving_variance": np.array([4.0, 9, 16])}
        found = variables(renorm=True, param_initializers=given)
        np.testing.assert_array_equal(found["renorm_mean"], [1, 2, 3])
        np.testing.assert_array_equal(found["moving_stddev"], [2, 3, 4])
        np.testing.assert_array_equal(found["renorm_stddev"], [2, 3, 4])

    def test_of_the_old_renorm_are_zero(self) -> None:
        given = {"moving_mean": np.array([1.0, 2, 3]), "moving_variance": np.array([4.0, 9, 16])}
        found = variables(renorm=True, renorm_zero_debias=True, param_initializers=given)
        names = ("renorm_mean", "renorm_stddev", "renorm_mean_weight", "renorm_stddev_weight")
        assert all(not found[name].any() for name in names)
        assert "moving_stddev" not in found
        np.testing.assert_array_equal(found["moving_variance"], [4, 9, 16])

    @pytest.mark.parametrize("length", [0, 2, 4])
    def test_of_another_length_are_refused(self, length: int) -> None:
        bench = LayerBench()
        layer = bench.layer(param_initializers={"moving_mean": np.zeros(length)})
        with pytest.raises(InvalidArgumentError, match=f"Takes 3, as there are 3 channels, but got {length}") as error:
            forward(layer, np.ones((2, 3), np.float32))
        assert error.value.field == "inputs"
        assert (layer.variables, bench.memory.used) == (None, layer.config.num_bytes)
        if length:
            forward(layer, np.ones((2, length), np.float32))


class TestSetVariables:
    def test_all_or_nothing(self) -> None:
        layer = LayerBench().layer()
        forward(layer, np.ones((2, 3), np.float32))
        before = layer.variables
        good = np.full(3, 9, np.float32)
        for name, bad, error in (
            ("moving_mean", np.zeros(4, np.float32), InvalidArgumentError),
            ("moving_mean", np.zeros((1, 3), np.float32), InvalidArgumentError),
            ("moving_mean", np.zeros(3), InvalidArgumentError),
            ("gamma", good, NotFoundError),
            ("", good, NotFoundError),
        ):
            with pytest.raises(error):
                asyncio.run(layer.set_variables({"beta": good, name: bad}))
            assert layer.variables is before
        asyncio.run(layer.set_variables({"beta": good, "moving_mean": good * 2}))
        assert layer.get_variables(["beta", "moving_mean", "beta"])["moving_mean"].tolist() == [18.0] * 3

    def test_not_before_they_are_created(self) -> None:
        layer = LayerBench().layer()
        with pytest.raises(NotFoundError, match="its variables are created by the first forward"):
            asyncio.run(layer.set_variables({"beta": np.zeros(3, np.float32)}))
        assert layer.get_variables(()) == {}

    def test_updates_go_on_from_there(self) -> None:
        layer = LayerBench().layer(decay=0.5, zero_debias_moving_mean=True)
        x = np.full((2, 3), 8, np.float32)
        forward(layer, x)
        values = {"moving_mean/biased": np.full(3, 4, np.float32), "moving_mean/local_step": np.array(1, np.float32)}
        asyncio.run(layer.set_variables(values))
        run_updates(layer)
        found = layer.get_variables(())
        np.testing.assert_allclose(found["moving_mean/biased"], [6.0] * 3)
        np.testing.assert_allclose(found["moving_mean"], [8.0] * 3)
        assert found["moving_mean/local_step"] == 2


def test_reuse_takes_a_name() -> None:
    with pytest.raises(InvalidArgumentError, match="reuse=True cannot be used without a name_or_scope") as error:
        LayerBench().layer(ResourceKey("default", ""), Reuse.REQUIRED)
    assert error.value.field == "layer.name"
