"""The recorded cases of the batch_norm layer, as data.

Imported by the script that runs TensorFlow, so it needs nothing but what comes with that.
"""

import zlib
from typing import Any

from tests.golden.seeded_inputs import DTYPES
from tests.golden.seeded_layer_inputs import AdjustmentShape, LayerCall, Shape, Weights

IMPLEMENTATIONS: dict[str, tuple[int, dict[str, Any]]] = {
    "slim fused": (2, {}),
    "core fused": (4, {}),
    "core unfused": (3, {}),
    "legacy": (3, {"updates_collections": "my_updates"}),
}
"""A rank, and arguments, with which each of the layer's implementations runs."""

ACTIVATIONS = (
    *("relu", "relu6", "tanh", "sigmoid", "elu", "selu"),
    *("softplus", "softsign", "leaky_relu", "gelu", "swish"),
)

PARAMS = ("beta", "gamma")
VARIABLES = (*PARAMS, "moving_mean", "moving_variance")
SHAPES: dict[int, Shape] = {2: (5, 3), 3: (2, 3, 4), 4: (2, 3, 2, 5), 5: (2, 2, 3, 2, 3)}
LARGER: dict[int, Shape] = {2: (64, 7), 4: (4, 5, 3, 6)}
LAYOUTS = ("NHWC", "NCHW")


def _call(
    name: str,
    shape: Shape | int,
    *,
    dtype: str = "float32",
    initialised: tuple[str, ...] = VARIABLES,
    is_training: bool = True,
    batch_weights: Weights | None = None,
    adjustment: AdjustmentShape | None = None,
    **arguments: Any,
) -> LayerCall:
    shape = SHAPES[shape] if isinstance(shape, int) else shape
    mode = "training" if is_training else "inference"
    full_name = f"{dtype}, {'x'.join(map(str, shape))} {arguments.get('data_format', 'NHWC')}, {mode}: {name}"
    seed = zlib.crc32(full_name.encode())
    arguments = {"decay": 0.9, "scale": True} | arguments
    return LayerCall(full_name, seed, shape, dtype, arguments, initialised, is_training, batch_weights, adjustment)


def _of_every_implementation(name: str, **changes: Any) -> list[LayerCall]:
    return [
        _call(f"{implementation}, {name}", rank, **(arguments | changes))
        for implementation, (rank, arguments) in IMPLEMENTATIONS.items()
    ]


def _formats() -> list[LayerCall]:
    """Returns every rank, layout and dtype, fused where possible and not."""
    return [
        _call(f"{fused=}", rank, dtype=dtype, data_format=layout, fused=fused)
        for rank in SHAPES
        for layout in LAYOUTS
        for dtype in DTYPES
        for fused in (None, False)
        # What is fused for two dimensions refuses float64.
        if not (rank == 2 and dtype == "float64" and fused is None)
    ] + [_call("fused=True", rank, fused=True) for rank in SHAPES]


def _updates() -> list[LayerCall]:
    ways = (None, "my_updates")
    calls = [
        _call(f"{fused=}, {updates=}", rank, data_format=layout, fused=fused, updates_collections=updates)
        for rank in SHAPES
        for layout in LAYOUTS
        for fused in (None, False)
        for updates in ways
    ]
    for dtype in ("float16", "float64"):
        calls += [
            _call(f"{updates=}", rank, dtype=dtype, updates_collections=updates, fused=False)
            for rank in (2, 4)
            for updates in ways
        ]
    calls += [_call("updates='update_ops'", rank, updates_collections="update_ops") for rank in SHAPES]
    return [*calls, _call("fused, updates=None", 4, dtype="float16", updates_collections=None)]


def _zero_debias() -> list[LayerCall]:
    options: dict[str, Any] = {"zero_debias_moving_mean": True}
    calls = [
        _call(f"zero_debias, {fused=}", rank, data_format=layout, fused=fused, **options)
        for rank in SHAPES
        for layout in LAYOUTS
        for fused in (None, False)
    ]
    calls += [
        _call(f"zero_debias, {updates=}", rank, updates_collections=updates, **options)
        for rank in (2, 3)
        for updates in (None, "my_updates")
    ]
    calls += [
        _call(f"zero_debias, {decay=}", rank, decay=decay, **options) for rank in (3, 4) for decay in (0.1, 0.5, 0.999)
    ]
    return [
        *calls,
        _call("zero_debias, fused=None", 4, dtype="float16", **options),
        _call("zero_debias, fused=False", 4, dtype="float16", fused=False, **options),
        _call("zero_debias", 3, dtype="float64", **options),
        _call("zero_debias, as initialised", 2, initialised=(), **options),
    ]


def _parameters() -> list[LayerCall]:
    """Returns those with center, scale, epsilon, decay and initial values."""
    calls = []
    for center in (False, True):
        for scale in (False, True):
            calls += _of_every_implementation(f"{center=}, {scale=}", center=center, scale=scale)
        calls.append(_call(f"legacy, {center=}", 3, dtype="float16", center=center, updates_collections=None))
    for epsilon in (0.0, 1e-5, 0.1):
        calls += _of_every_implementation(f"{epsilon=}", epsilon=epsilon)
    for decay in (0.0, 0.5, 0.99, 0.999, 1.0):
        calls += _of_every_implementation(f"{decay=}", decay=decay)
    calls += _of_every_implementation("as initialised", initialised=())
    calls += _of_every_implementation("as initialised", initialised=(), dtype="float16")
    calls += _of_every_implementation("gamma and moving_mean given", initialised=("gamma", "moving_mean"))
    return [*calls, *_of_every_implementation("not trainable", trainable=False)]


def _activations() -> list[LayerCall]:
    return [
        _call(f"{implementation}, {activation}", rank, dtype=dtype, activation_fn=activation, **arguments)
        for implementation, (rank, arguments) in IMPLEMENTATIONS.items()
        for activation in ACTIVATIONS
        for dtype in ("float32", "float16")
        if implementation in ("slim fused", "legacy") and not (dtype == "float16" and implementation == "legacy")
    ] + [
        call
        for activation in ("relu", "sigmoid")
        for call in (
            _call(f"core unfused, {activation}", 3, dtype="float64", activation_fn=activation),
            _call(f"core fused, {activation}", 4, activation_fn=activation),
            _call(f"legacy, {activation}", 3, activation_fn=activation, updates_collections=None, dtype="float16"),
        )
    ]


def _regularizers() -> list[LayerCall]:
    kinds: dict[str, dict[str, float]] = {
        "l1": {"l1": 0.1},
        "l2": {"l2": 0.3},
        "l1_l2": {"l1": 0.2, "l2": 0.05},
    }
    calls = []
    for kind, scales in kinds.items():
        plain = {"regularizer": [kind, scales]}
        calls += _of_every_implementation(f"{kind} of both", param_regularizers=dict.fromkeys(PARAMS, plain))
    strong = {"gamma": {"regularizer": ["l2", {"l2": 0.5}]}}
    calls += _of_every_implementation("l2 of gamma", param_regularizers=strong, dtype="float16")
    return [
        *calls,
        _call("core unfused, l2 of gamma", 3, dtype="float64", param_regularizers=strong),
        _call("core unfused, l2 of a gamma that is not", 3, scale=False, param_regularizers=strong),
        _call("core fused, l1 of beta", 4, param_regularizers={"beta": {"regularizer": ["l1", {"l1": 2.0}]}}),
    ]


def _renorm() -> list[LayerCall]:
    calls = [
        _call("renorm", rank, data_format=layout, renorm=True, dtype=dtype)
        for rank in SHAPES
        for layout in LAYOUTS
        for dtype in ("float32", "float16" if rank in (2, 5) else "bfloat16")
    ]
    clippings: dict[str, dict[str, float]] = {
        "rmax": {"rmax": 1.1},
        "rmin": {"rmin": 0.9},
        "dmax": {"dmax": 0.2},
        "all": {"rmax": 1.5, "rmin": 0.75, "dmax": 0.5},
        "nothing": {},
        "rmin above rmax": {"rmax": 0.5, "rmin": 2.0},
        "no correction": {"rmax": 1.0, "rmin": 1.0, "dmax": 0.0},
    }
    calls += [
        _call(f"renorm, clipping {name}", rank, renorm=True, renorm_clipping=clipping)
        for name, clipping in clippings.items()
        for rank in (2, 4)
    ]
    calls += [
        _call(f"renorm, {renorm_decay=}", 2, renorm=True, renorm_decay=renorm_decay) for renorm_decay in (0.0, 0.5)
    ]
    return [
        *calls,
        _call("renorm, as initialised", 2, renorm=True, initialised=()),
        _call("renorm, as initialised, decay of TensorFlow", 2, renorm=True, initialised=(), decay=0.999),
        _call("renorm, fused=True", 4, renorm=True, fused=True),
        _call("renorm, center=False", 2, renorm=True, center=False),
        _call("renorm, scale=False", 4, renorm=True, scale=False),
        _call("renorm, neither center nor scale", 3, renorm=True, center=False, scale=False),
        _call("renorm, epsilon=0.1", 3, renorm=True, epsilon=0.1),
        _call("renorm, l2 and relu", 4, renorm=True, activation_fn="relu", param_regularizers=_L2_OF_GAMMA),
        _call("renorm", 2, renorm=True, is_training=False),
        _call("clipping, but no renorm", 3, renorm_clipping={"rmax": 1.0, "anything": 2.0}),
    ]


_L2_OF_GAMMA = {"gamma": {"regularizer": ["l2", {"l2": 0.1}]}}


def _batch_weights() -> list[LayerCall]:
    calls = [
        _call("batch_weights", rank, data_format=layout, batch_weights="positive")
        for rank in SHAPES
        for layout in LAYOUTS
    ]
    kinds: tuple[Weights, ...] = ("with zeros", "all zero", "integers", "wider", "equal")
    calls += [_call(f"batch_weights {kind}", rank, batch_weights=kind) for kind in kinds for rank in (2, 4)]
    calls += [
        _call(f"batch_weights {kind}", rank, dtype=dtype, batch_weights=kind)
        for dtype in ("float16", "float64", "bfloat16")
        for rank in (2, 3)
        for kind in kinds[:1]
    ]
    return [
        *calls,
        _call("batch_weights wider", 3, dtype="float16", batch_weights="wider"),
        _call("batch_weights in place", 2, batch_weights="positive", updates_collections=None),
        _call("batch_weights, my_updates", 4, batch_weights="positive", updates_collections="my_updates"),
        _call("batch_weights, zero_debias", 3, batch_weights="positive", zero_debias_moving_mean=True),
        _call("batch_weights, neither center nor scale", 2, batch_weights="positive", center=False, scale=False),
        _call("batch_weights, l2 ignored", 2, batch_weights="positive", param_regularizers=_L2_OF_GAMMA),
        _call("batch_weights, fused=True, tanh", 4, batch_weights="positive", fused=True, activation_fn="tanh"),
        _call("batch_weights", 3, batch_weights="positive", is_training=False),
        _call("batch_weights", LARGER[2], batch_weights="with zeros"),
    ]


def _adjustments() -> list[LayerCall]:
    kinds: tuple[AdjustmentShape, ...] = ("scalar", "channels", "ones and channels", "items", "full")
    calls = [_call(f"adjustment {kind}", rank, adjustment=kind) for rank in (2, 4) for kind in kinds]
    calls += [
        _call(f"adjustment {kind}", rank, data_format="NCHW", adjustment=kind)
        for rank in SHAPES
        for kind in ("ones and channels", "full")
    ]
    calls += [
        _call("adjustment full", rank, dtype=dtype, adjustment="full")
        for rank in (3, 5)
        for dtype in ("float32", "float16", "bfloat16", "float64")
    ]
    calls += [
        _call(f"adjustment {kind} and renorm", rank, adjustment=kind, renorm=True, data_format=layout)
        for kind in ("ones and channels", "full")
        for rank in (2, 4)
        for layout in LAYOUTS
    ]
    return [
        *calls,
        _call(
            "adjustment and clipped renorm",
            3,
            adjustment="full",
            renorm=True,
            renorm_clipping={"rmax": 1.1, "dmax": 0.3},
        ),
        _call("adjustment and renorm", 4, dtype="float16", adjustment="channels", renorm=True),
        _call("adjustment, center=False", 2, adjustment="channels", center=False),
        _call("adjustment, scale=False", 4, adjustment="channels", scale=False),
        _call("adjustment, neither center nor scale", 3, adjustment="items", center=False, scale=False),
        _call("adjustment, fused=True, swish", 4, adjustment="channels", fused=True, activation_fn="swish"),
        _call("adjustment, l2", 4, adjustment="channels", param_regularizers=_L2_OF_GAMMA),
        _call("adjustment", 2, adjustment="channels", is_training=False),
        _call("adjustment ignored beside batch_weights", 3, adjustment="channels", batch_weights="positive"),
        _call("adjustment ignored in place", 4, adjustment="channels", updates_collections=None),
        _call("adjustment ignored, my_updates", 2, adjustment="channels", updates_collections="my_updates"),
        _call("adjustment ignored, zero_debias", 2, adjustment="full", zero_debias_moving_mean=True),
    ]


def _sizes() -> list[LayerCall]:
    """Returns those with one element per channel, one channel, and many elements."""
    calls = []
    for rank in SHAPES:
        shape = (*[1] * (rank - 1), 3)
        calls += [_call(f"one element per channel, {fused=}", shape, fused=fused) for fused in (None, False)]
        calls.append(_call("one element per channel, in place", shape, updates_collections=None))
    calls += [
        _call(f"{fused=}", shape, dtype=dtype, fused=fused)
        for shape in LARGER.values()
        for fused in (None, False)
        for dtype in ("float32", "float16")
    ]
    return [
        *calls,
        _call("one element per channel, batch_weights", (1, 3), batch_weights="positive"),
        _call("one element per channel, renorm", (1, 3), renorm=True),
        _call("one element per channel, adjustment", (1, 1, 1, 3), adjustment="full"),
        _call("two elements per channel", (2, 3)),
        _call("one channel", (4, 1)),
        _call("one channel", (2, 1, 3, 2), data_format="NCHW"),
        _call("renorm", LARGER[2], renorm=True),
    ]


def _inference() -> list[LayerCall]:
    calls = [
        _call(f"{fused=}", 4, fused=fused, data_format=f, is_training=False) for fused in (None, False) for f in LAYOUTS
    ]
    for dtype in DTYPES:
        calls += [
            _call(name, rank, dtype=dtype, is_training=False, **arguments)
            for name, (rank, arguments) in IMPLEMENTATIONS.items()
            # What is fused does not take float64.
            if not (name in ("slim fused", "core fused") and dtype == "float64")
        ]
    return [
        *calls,
        _call("as initialised", 4, is_training=False, initialised=()),
        _call("in place", 2, is_training=False, updates_collections=None),
        _call("zero_debias", 3, is_training=False, zero_debias_moving_mean=True),
        _call("tanh, scale=False", 4, is_training=False, scale=False, activation_fn="tanh"),
    ]


CALLS: tuple[LayerCall, ...] = (
    *_formats(),
    *_updates(),
    *_zero_debias(),
    *_parameters(),
    *_activations(),
    *_regularizers(),
    *_renorm(),
    *_batch_weights(),
    *_adjustments(),
    *_sizes(),
    *_inference(),
)
