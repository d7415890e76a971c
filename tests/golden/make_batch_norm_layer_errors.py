"""Records what tf_slim's batch_norm layer refuses: writes batch_norm_layer_errors.json beside this file.

What looks wrong but is taken is recorded, too. A refused call may follow one that makes its variables. `make golden`
runs this in the environment of make_batch_norm_layer.py.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.golden.tf_batch_norm_layer import VERSIONS, batch_norm, tf1

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Call:
    """A call of a layer with new arguments.

    Attributes:
        shape: Of x, whose elements are ones.
        dtype: Of x.
        arguments: Of the layer. The value of an initializer is the shape of an array of ones.
        batch_weights: Dtype and shape; they are ones.
        adjustment: Dtype and shape of both, which are ones.
        is_training: Of the call.
    """

    shape: Shape = (5, 3)
    dtype: str = "float32"
    arguments: Mapping[str, Any] = field(default_factory=dict)
    batch_weights: tuple[str, Shape] | None = None
    adjustment: tuple[str, Shape] | None = None
    is_training: bool = True


@dataclass(frozen=True)
class Fault:
    """What may be wrong, and the calls to find out: it is wrong with the last."""

    name: str
    calls: tuple[Call, ...]


def fault(name: str, shape: Shape = (5, 3), dtype: str = "float32", **arguments: Any) -> Fault:
    return Fault(name, (Call(shape, dtype, arguments),))


def weighted(name: str, weights: tuple[str, Shape], **arguments: Any) -> Fault:
    return Fault(name, (Call(arguments=arguments, batch_weights=weights),))


def again(name: str, first: Call, second: Call) -> Fault:
    """Returns a fault of a second call whose scope is that of the first."""
    return Fault(name, (_in_scope(first), _in_scope(second)))


def _in_scope(call: Call) -> Call:
    return Call(**(vars(call) | {"arguments": {"scope": "layer", **call.arguments}}))


RENORM: dict[str, Any] = {"renorm": True}
REUSE: dict[str, Any] = {"reuse": True}
CUSTOM: dict[str, Any] = {"updates_collections": "my_updates"}
ITEMS = ("float32", (5,))
IMAGES: Shape = (2, 4, 4, 3)

FAULTS: tuple[Fault, ...] = (
    *(fault(f"data_format of rank {len(shape)}", shape, data_format="NHCW") for shape in ((5, 3), (2, 3, 4), IMAGES)),
    weighted("data_format, with batch_weights", ITEMS, data_format="nhwc"),
    fault("data_format of five dimensions", (2, 2, 2, 2, 3), data_format="NDHWC"),
    fault("data_format, and renorm with custom updates_collections", data_format="CHWN", **RENORM, **CUSTOM),
    weighted("renorm with batch_weights", ITEMS, **RENORM),
    fault("renorm with custom updates_collections", **RENORM, **CUSTOM),
    fault("renorm in place", **RENORM, updates_collections=None),
    fault("renorm with zero_debias", **RENORM, zero_debias_moving_mean=True),
    weighted("renorm with batch_weights of a wrong shape", ("float32", (6,)), **RENORM),
    fault("unknown key of renorm_clipping", **RENORM, renorm_clipping={"rmax": 2.0, "dmin": 1.0}),
    fault("only an unknown key of renorm_clipping", **RENORM, renorm_clipping={"max": 1.0}),
    fault(
        "unknown key of renorm_clipping, and zero_debias",
        **RENORM,
        renorm_clipping={"max": 1.0},
        zero_debias_moving_mean=True,
    ),
    fault("unknown key of renorm_clipping, no renorm", renorm_clipping={"max": 1.0}),
    weighted("too many batch_weights", ("float32", (6,))),
    weighted("too few batch_weights", ("float32", (4,))),
    weighted("one of batch_weights", ("float32", (1,))),
    weighted("batch_weights of rank 2", ("float32", (5, 1))),
    weighted("batch_weights of the shape of x", ("float32", (5, 3))),
    weighted("batch_weights of rank 0", ("float32", ())),
    weighted("batch_weights that are bool", ("bool", (5,))),
    weighted("batch_weights that are complex", ("complex64", (5,))),
    Fault(
        "batch_weights of a wrong shape in inference",
        (Call(batch_weights=("float32", (6,)), is_training=False),),
    ),
    fault("reuse without scope", **REUSE),
    fault("reuse without scope, rank 4", IMAGES, **REUSE),
    fault("reuse without scope, legacy", updates_collections="my_updates", fused=False, **REUSE),
    fault("reuse of a scope that does not exist", scope="layer", **REUSE),
    fault("reuse of a scope that does not exist, rank 4", IMAGES, scope="layer", **REUSE),
    fault("reuse of a scope that does not exist, legacy", (2, 3, 4), scope="layer", **CUSTOM, **REUSE),
    again("scope that exists", Call(), Call()),
    again("scope that exists, rank 4", Call(IMAGES), Call(IMAGES)),
    again("scope that exists, rank 3", Call((2, 3, 4)), Call((2, 3, 4))),
    again("scope that exists, legacy", Call(batch_weights=ITEMS), Call(batch_weights=ITEMS)),
    again("scope that exists, reuse=False", Call(), Call(arguments={"reuse": False})),
    again("another number of channels", Call(), Call((5, 4), arguments=REUSE)),
    again("another number of channels, rank 4", Call(IMAGES), Call((2, 4, 4, 5), arguments=REUSE)),
    again("another number of channels, legacy", Call(batch_weights=ITEMS), Call((5, 4), "float32", REUSE, ITEMS)),
    again("another rank", Call(), Call(IMAGES, arguments=REUSE)),
    again("float64 after float32", Call((2, 3, 4)), Call((2, 3, 4), "float64", REUSE)),
    again("float32 after float64", Call((2, 3, 4), "float64"), Call((2, 3, 4), "float32", REUSE)),
    again("float16 after float32", Call((2, 3, 4)), Call((2, 3, 4), "float16", REUSE)),
    again("float16 legacy after float16 fused", Call(dtype="float16"), Call((5, 3), "float16", REUSE, ITEMS)),
    again(
        "float16 fused after float16 legacy", Call(dtype="float16", batch_weights=ITEMS), Call((5, 3), "float16", REUSE)
    ),
    again("reuse with a scale that is not", Call(), Call(arguments={"scale": True, **REUSE})),
    again("reuse without the center that is", Call(), Call(arguments={"center": False, **REUSE})),
    again("reuse with renorm that is not", Call(), Call(arguments={**RENORM, **REUSE})),
    again("reuse with zero_debias that is not", Call(), Call(arguments={"zero_debias_moving_mean": True, **REUSE})),
    again(
        "zero_debias twice in training",
        Call(arguments={"zero_debias_moving_mean": True}),
        Call(arguments={"zero_debias_moving_mean": True, **REUSE}),
    ),
    *(fault(f"rank {len(shape)}", shape) for shape in ((3,), ())),
    *(fault(f"rank {len(shape)}, NCHW", shape, data_format="NCHW") for shape in ((3,), ())),
    *(fault(f"rank {len(shape)}, unfused", shape, fused=False) for shape in ((3,), ())),
    *(fault(f"rank {len(shape)}, legacy", shape, **CUSTOM) for shape in ((3,), ())),
    fault("rank 6", (1, 2, 1, 2, 1, 3)),
    fault("rank 6, legacy, NCHW", (1, 2, 1, 2, 1, 3), data_format="NCHW", **CUSTOM),
    fault("no items", (0, 3)),
    fault("no channels", (5, 0)),
    fault("float64 of rank 2, fused", dtype="float64"),
    fault("float64 of rank 4, zero_debias", IMAGES, "float64", zero_debias_moving_mean=True),
    fault("float64 of rank 4, fused=True", IMAGES, "float64", fused=True),
    fault("float64 with renorm", dtype="float64", **RENORM),
    *(fault(f"{dtype} of rank {len(s)}", s, dtype) for dtype in ("int32", "bool") for s in ((5, 3), (2, 3, 4), IMAGES)),
    fault("int32, legacy", (2, 3, 4), "int32", **CUSTOM),
    fault("complex64 of rank 3", (2, 3, 4), "complex64"),
    fault("renorm with fused=True", IMAGES, fused=True, **RENORM),
    *(
        fault(
            f"negative {scale} of {kind}", param_regularizers={"gamma": {"regularizer": [kind, {**good, scale: -0.5}]}}
        )
        for kind, good in (("l1", {"l1": 1.0}), ("l2", {"l2": 1.0}), ("l1_l2", {"l1": 1.0, "l2": 1.0}))
        for scale in good
    ),
    fault("scale of a regularizer that is an integer", param_regularizers={"beta": {"regularizer": ["l2", {"l2": 1}]}}),
    *(
        fault(
            f"initializer of {name} with a wrong shape, rank {len(shape)}",
            shape,
            scale=True,
            param_initializers={name: (4,)},
        )
        for name in ("beta", "gamma", "moving_mean", "moving_variance")
        for shape in ((5, 3), IMAGES)
    ),
    fault("initializer with too few elements", param_initializers={"beta": (2,)}),
    fault("initializer with one element", param_initializers={"beta": (1,)}),
    fault("initializer that is a scalar", param_initializers={"beta": ()}),
    fault("initializer of rank 2", param_initializers={"beta": (1, 3)}),
    fault("initializer of an unknown variable", param_initializers={"delta": (4,)}),
    Fault("adjustment of a wrong shape", (Call(adjustment=("float32", (4,))),)),
    Fault("adjustment larger than x", (Call((1, 3), adjustment=("float32", (5, 3))),)),
    Fault("adjustment of more dimensions than x", (Call(adjustment=("float32", (1, 5, 3))),)),
    Fault("float64 adjustment of float32", (Call(adjustment=("float64", (3,))),)),
    Fault("float16 adjustment of float16", (Call(dtype="float16", adjustment=("float16", (3,))),)),
    Fault("adjustment of a wrong shape in inference", (Call(adjustment=("float32", (4,)), is_training=False),)),
    fault("decay above 1", decay=1.5),
    fault("negative decay", decay=-0.5),
    fault("negative epsilon", epsilon=-0.001),
    fault("empty scope", scope=""),
    fault("scope with a space", scope="my layer"),
    fault("scope with slashes", scope="tower/layer"),
    fault("scope that starts with an underscore", scope="_layer"),
)


def main() -> None:
    """Makes all calls, and writes down what TensorFlow says to the last of each: null where it takes it."""
    tf1.logging.set_verbosity(tf1.logging.ERROR)
    records = [asdict(fault) | {"error": refusal(fault)} for fault in FAULTS]
    lines = ",\n".join(json.dumps(record) for record in records)
    path = Path(__file__).with_name("batch_norm_layer_errors.json")
    path.write_text(f'{{{json.dumps(VERSIONS)[1:-1]}, "errors": [\n{lines}\n]}}\n')


def refusal(fault: Fault) -> dict[str, str] | None:
    """Returns the type and the text of the error, if there is one."""
    with tf1.Graph().as_default(), tf1.Session() as session:
        try:
            for call in fault.calls:
                y = make(call)
            session.run(tf1.global_variables_initializer())
            session.run([y, tf1.get_collection("update_ops")])
        except Exception as error:
            return {"type": type(error).__name__, "text": without_places(str(getattr(error, "message", error)))}
    return None


def make(call: Call) -> Any:
    arguments = dict(call.arguments)
    if "param_initializers" in arguments:
        arguments["param_initializers"] = {n: ones("float32", s) for n, s in arguments["param_initializers"].items()}
    of_the_call: dict[str, Any] = {"is_training": call.is_training}
    if call.batch_weights is not None:
        of_the_call["batch_weights"] = tf1.ones(call.batch_weights[1], call.batch_weights[0])
    if call.adjustment is not None:
        adjustment = tf1.ones(call.adjustment[1], call.adjustment[0])
        of_the_call["adjustment"] = lambda _: (adjustment, adjustment)
    return batch_norm(tf1.ones(call.shape, call.dtype), arguments, **of_the_call)


def ones(dtype: str, shape: Shape) -> NDArray[Any]:
    return np.ones(shape, dtype)


def without_places(text: str) -> str:
    """Removes what tells in which file and line an error, or what it is about, came to be."""
    text = re.sub(r" Originally defined at:.*", "", text, flags=re.DOTALL)
    text = re.sub(r"\n\nDetected at node.*?\nNode: '[^']*'\n", " ", text, flags=re.DOTALL)
    return re.sub(r"\n\t \[\[.*|\n\nOriginal stack trace.*", "", text, flags=re.DOTALL).strip()


if __name__ == "__main__":
    main()
