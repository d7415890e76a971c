"""Bad requests of ParameterService."""

from typing import Any

import grpc
import numpy as np
from google.protobuf.duration_pb2 import Duration

from gradserve_protocol.v1 import accumulator_pb2, codecs_pb2, lease_pb2, parameters_pb2, tensor_pb2
from tests.bad_input.requests import (
    F32,
    INT64_MAX,
    INT64_MIN,
    INVALID,
    NOT_FOUND,
    OUT_OF_RANGE,
    SPARSE,
    Bad,
    component,
    dense,
    identity,
    sparse,
    tensor,
    zeros,
)
from tests.rpc.parameters.requests import (
    MOMENTUM,
    SGD,
    STATE,
    Change,
    Delete,
    Evaluations,
    Fork,
    Get,
    List,
    Push,
    PushPull,
    Read,
    Report,
    Rounds,
    W,
    create,
    push,
    ref,
    slot,
    spec,
    summands,
    values,
)

EXISTS, ABORTED = grpc.StatusCode.ALREADY_EXISTS, grpc.StatusCode.ABORTED

PARAMETER_CALLS = [
    ("CreateParameters", create(spec=spec(optimizer=MOMENTUM, rounds=parameters_pb2.RoundRules(num_required=3)))),
    ("Push", push(sequence=3, worker_id="a")),
]
"""The parameters that exist before the bad requests come."""


def without(message: Any, *fields: str, **others: Any) -> Any:
    """Returns a copy of a message without some fields, and with others."""
    copied = type(message)()
    copied.CopyFrom(message)
    for name in (*fields, *others):
        copied.ClearField(name)
    copied.MergeFrom(type(message)(**others))
    return copied


def bad_create(message: str, field: str, **fields: Any) -> Bad:
    return Bad("CreateParameters", create("bad", **fields), message, field)


def bad_spec(message: str, field: str, *components: accumulator_pb2.ComponentSpec, **fields: Any) -> Bad:
    return bad_create(message, f"spec.{field}", spec=spec(*components, **fields))


def unknown(field: str) -> Any:
    """Returns an enum field with a value that there is not."""
    return {field: 99}


def packed_component(codec: Any = 2, data: tensor_pb2.Tensor | None = None) -> accumulator_pb2.ComponentGradient:
    """Returns component "w" as int8, with these changes."""
    right = tensor(np.zeros(4 + 6), np.uint8) if data is None else data
    return accumulator_pb2.ComponentGradient(name="w", packed=codecs_pb2.PackedTensor(codec=codec, data=right))


BAD_SPECS = [
    bad_create("expected at least one component", "spec.components", spec=without(spec(), "components")),
    bad_spec("'b': expected a known DataType", "components[1].dtype", W, component("b", dtype=99, dims=[1])),
    bad_spec("expected a dtype out of", "components[0].dtype", component("w", tensor_pb2.DATA_TYPE_INT32, [1])),
    bad_spec("expected dense components", "components[0].layout", component("w", dims=[2, 3], **SPARSE)),
    bad_spec("expected a known shape", "components[0].shape", component("w", dims=[2, -1])),
    bad_spec("expected a known shape", "components[0].shape", component("w")),
    bad_spec("'w' twice", "components[1].name", W, W),
    bad_spec("expected a known kind of updates, got 99", "update", **unknown("update")),
    bad_spec("expected a known normalization, got 99", "normalization", **unknown("normalization")),
    bad_spec("expected a known durability, got 99", "durability", **unknown("durability")),
    bad_spec("expected keep_versions of at least 1, got -1", "keep_versions", keep_versions=-1),
    bad_spec("expected keep_rounds of at least 1, got -1", "keep_rounds", keep_rounds=-1),
    bad_spec("expected a positive, finite clip_norm, got 0", "clip_norm", clip_norm=0.0),
    bad_spec("expected a positive, finite clip_norm, got nan", "clip_norm", clip_norm=float("nan")),
    bad_spec("expected a name for each entry", "agreement", agreement={"": "x"}),
    bad_spec(
        "expected NONE, as the server has no state directory", "durability", durability=accumulator_pb2.DURABILITY_ROUND
    ),
    bad_create("expected num_required of at least 1", "spec.rounds.num_required", spec=without(spec(), "rounds")),
    Bad("CreateParameters", create(spec=spec(keep_versions=3)), "keep_versions is 2, not 3", "spec", EXISTS),
    Bad(
        "CreateParameters",
        create(spec=spec(W), values=values()[:1]),
        "it has ['b'], which are not among yours",
        "spec",
        EXISTS,
    ),
]

BAD_VERSIONS = [
    bad_create("expected values with step, got none", "step", values=[], step=1),
    bad_create("expected values with state, got none", "state", values=[], state=STATE),
    bad_create(f"expected a step from 0 to {2**62}, got -1", "step", step=-1),
    bad_create(f"expected a step from 0 to {2**62}, got {2**63 - 1}", "step", step=2**63 - 1),
    bad_create("expected every component, got none for ['b']", "values", values=values()[:1]),
    bad_create("expected components ['b', 'w'], got 'x'", "values[2].name", values=[*values(), dense(zeros(1), "x")]),
    bad_create("expected components ['b', 'w'], got ''", "values[0].name", values=[dense(zeros(2, 3))]),
    bad_create(
        "expected every component once, got 'b' twice", "values[2].name", values=[*values(), dense(zeros(3), "b")]
    ),
    bad_create("got sparse", "values[0]", values=[sparse([0], (1, 3), name="w")]),
    bad_create("got none", "values[0]", values=[accumulator_pb2.ComponentGradient(name="w")]),
    bad_create("expected shape [2,3], got [3, 2]", "values[0].dense.shape", values=[dense(zeros(3, 2), "w")]),
    bad_create(
        "component 'w': expected dtype float32, got float64",
        "values[0].dense.dtype",
        values=[dense(tensor(np.zeros((2, 3)), np.float64), "w")],
    ),
    bad_create(
        "component 'w': expected content or a handle",
        "values[0].dense",
        values=[dense({"dtype": F32, "shape": [2, 3]}, "w")],
    ),
    bad_create(
        "expected 24 bytes",
        "values[0].dense.content",
        values=[dense({"dtype": F32, "shape": [2, 3], "content": b""}, "w")],
    ),
    bad_create(
        "got 'x'", "state.slots[0].component", state=without(STATE, slots=[slot("momentum_buffer", "x", zeros(3))])
    ),
    bad_create(
        "expected slot 'sum' of component 'b' once, got it twice",
        "state.slots[1].name",
        state=without(STATE, slots=[slot("sum", "b", zeros(3))] * 2),
    ),
    bad_create(
        "expected shape [3], got [4]",
        "state.slots[0].value.shape",
        state=without(STATE, slots=[slot("sum", "b", zeros(4))]),
    ),
    bad_create(
        "expected at most 16 slots", "state.slots", state=without(STATE, slots=[slot("sum", "b", zeros(3))] * 17)
    ),
    bad_create(
        "expected every slot, got none for", "state.slots", spec=spec(optimizer=MOMENTUM), state=without(STATE, "slots")
    ),
    bad_create("expected no other slot", "state.slots", state=without(STATE, optimizer=SGD)),
    bad_create("expected the state of", "state.optimizer", state=STATE),
    bad_create(
        "expected a number for each of 2 components, got 1",
        "state.component_steps",
        state=without(STATE, component_steps=[1]),
    ),
    Bad("ChangeParameters", Change(parameters=ref(), step=0), "expected values with step, got none", "step"),
    Bad("ChangeParameters", Change(parameters=ref(), state=STATE), "expected values with state, got none", "state"),
    Bad("ChangeParameters", Change(parameters=ref(), values=values()[:1]), "got none for ['b']", "values"),
    Bad("ChangeParameters", Change(parameters=ref(), values=values(), step=-1), f"from 0 to {2**62}, got -1", "step"),
    Bad("ChangeParameters", Change(parameters=ref(), values=values(), step=2**62 + 1), f"got {2**62 + 1}", "step"),
    bad_create(
        f"expected counts of rounds from 0 to {2**62}, got {2**63 - 1}",
        "state",
        spec=spec(optimizer=MOMENTUM),
        state=without(STATE, rounds=2**63 - 1),
    ),
    bad_create(
        f"expected counts of rounds from 0 to {2**62}, got {2**63 - 1}",
        "state",
        spec=spec(optimizer=MOMENTUM),
        state=without(STATE, component_steps=[0, 2**63 - 1]),
    ),
]

BAD_CHANGES = [
    Bad("ChangeParameters", Change(parameters=ref(), optimizer=parameters_pb2.Optimizer()), "got none", "optimizer"),
    Bad(
        "ChangeParameters",
        Change(parameters=ref(), rounds=parameters_pb2.RoundRules()),
        "expected num_required of at least 1",
        "rounds.num_required",
    ),
    Bad(
        "ChangeParameters",
        Change(parameters=ref(), request_id=identity(1, "")),
        "got an empty one",
        "request_id.client_id",
    ),
    Bad("ListRounds", Rounds(parameters=ref(), since=-1), "of at least 0", "since"),
    Bad("ListRounds", Rounds(parameters=ref(), page_size=-1), "of at least 0", "page_size"),
    Bad("ListEvaluations", Evaluations(parameters=ref(), page_size=-1), "of at least 0", "page_size"),
]


def bad_update(message: str, field: str | None, *, code: grpc.StatusCode = INVALID, **fields: Any) -> list[Bad]:
    """Returns an update that must be refused, as a push and as a push_pull."""
    one = push(**fields)
    pull = PushPull()
    pull.MergeFromString(one.SerializeToString())
    return [Bad("Push", one, message, field, code), Bad("PushPullParameters", pull, message, field, code)]


TOO_MANY = {f"m{number}": 1.0 for number in range(33)}


def bad_report(message: str, field: str, **fields: Any) -> Bad:
    """Returns a report that must be refused."""
    return Bad("ReportEvaluation", Report(parameters=ref(), **{"metrics": {"loss": 1.0}, **fields}), message, field)


BAD_REPORTS = [
    bad_report("at least one metric, got none", "metrics", metrics={}),
    bad_report("got an empty one", "metrics", metrics={"": 1.0}),
    bad_report("at most 64 bytes, got 65", "metrics", metrics={"x" * 65: 1.0}),
    bad_report("at most 32 metrics", "metrics", metrics=TOO_MANY),
    bad_report("expected a positive, finite weight", "weight", weight=0.0),
    bad_report("expected a positive, finite weight", "weight", weight=float("inf")),
    bad_report("expected a positive, finite weight", "weight", weight=float("nan")),
    bad_report("at most 256 bytes", "worker_id", worker_id=257 * "w"),
    bad_report("at most 0, the step of the newest version", "step", step=1),
    bad_report("at most 0, the step of the newest version", "step", step=INT64_MIN),
    bad_report("got an empty one", "request_id.client_id", request_id=identity(1, "")),
]
BAD_UPDATES = [
    *bad_update("got an empty one", "metrics", metrics={"": 1.0}),
    *bad_update("at most 64 bytes, got 65", "metrics", metrics={"x" * 65: 1.0}),
    *bad_update("at most 32 metrics", "metrics", metrics=TOO_MANY),
    *bad_update("expected no metrics beside those of sum_of", "metrics", sum_of=summands(1.0), metrics={"loss": 1.0}),
    *bad_update(
        "at most 32 metrics",
        "sum_of[0].metrics",
        sum_of=[accumulator_pb2.Summand(metrics=TOO_MANY)],
    ),
    *bad_update("expected at least one component", "update", update=[]),
    *bad_update("got 'x'", "update[0].name", update=[dense(zeros(3), "x")]),
    *bad_update("expected every component once", "update", update=values(1.0)[:1] * 2),
    *bad_update("expected a dense value", "update[0]", update=[sparse([0], (1, 3), name="w")]),
    *bad_update("expected a dense value", "update[0]", update=[accumulator_pb2.ComponentGradient(name="w")]),
    *bad_update("expected [3], got [4]", "update[0].dense.shape", update=[dense(zeros(4), "b")]),
    *bad_update(
        "expected dtype float32", "update[0].dense.dtype", update=[dense(tensor(np.zeros(3), np.float64), "b")]
    ),
    *bad_update("component 'b'", "update[0].dense", update=[dense(tensor(np.full(3, np.nan)), "b")]),
    *bad_update("expected a local_step of at most 0", "local_step", local_step=1),
    *bad_update("expected a local_step of at most 0", "local_step", local_step=INT64_MAX),
    *bad_update("expected a positive, finite weight, got 0", "weight", weight=0.0),
    *bad_update("expected a positive, finite weight, got nan", "weight", weight=float("nan")),
    *bad_update("expected a weight from 2^-64 to 2^64", "weight", weight=1e300),
    *bad_update("expected at most 256 bytes", "worker_id", worker_id="x" * 257),
    *bad_update("expected no weight beside those of sum_of", "weight", weight=2.0, sum_of=summands(1.0)),
    *bad_update("expected a positive, finite weight, got 0", "sum_of[1].weight", sum_of=summands(1.0, 0.0)),
    *bad_update("expected a weight from 2^-64 to 2^64", "sum_of[0].weight", sum_of=summands(1e300)),
    *bad_update("expected at most 1024 gradients", "sum_of", sum_of=summands(*[1.0] * 1025)),
    *bad_update(
        "expected at most 256 bytes",
        "sum_of[0].worker_id",
        sum_of=[accumulator_pb2.Summand(worker_id="x" * 257)],
    ),
    *bad_update(
        "expected a client_id",
        "sum_of[0].request_id.client_id",
        sum_of=[accumulator_pb2.Summand(request_id=accumulator_pb2.RequestId(sequence=1))],
    ),
    *bad_update("a worker is in the round already", "sum_of", code=ABORTED, sum_of=summands(1.0, 1.0)),
    Bad("Push", push(sequence=3, worker_id="b"), "expected the same content", "request_id"),
]

BAD_WAITS = [
    Bad("ReadParameters", Read(parameters=ref(), step=0, with_state=True), "without a step, got step 0", "with_state"),
    Bad("ReadParameters", Read(parameters=ref(), state_optimizer=SGD), "none without with_state", "state_optimizer"),
    Bad(
        "ReadParameters",
        Read(parameters=ref(), with_state=True, state_optimizer=SGD),
        "expected none at the home of parameters",
        "state_optimizer",
    ),
    Bad(
        "ReadParameters",
        Read(parameters=ref(), with_state=True, state_optimizer=parameters_pb2.Optimizer()),
        "expected one of sgd",
        "state_optimizer",
    ),
    Bad("ReadParameters", Read(parameters=ref(), step=INT64_MIN), f"of step {INT64_MIN} is kept", "step", OUT_OF_RANGE),
    Bad("ReadParameters", Read(parameters=ref(), timeout=Duration(seconds=-1)), "of at least 0, got -1 s", "timeout"),
    Bad(
        "ReadParameters",
        Read(parameters=ref(), placement=tensor_pb2.Placement(**unknown("mode"))),
        "expected a known placement mode, got 99",
        "placement.mode",
    ),
    Bad(
        "PushPullParameters",
        PushPull(parameters=ref(), update=values(), timeout=Duration(seconds=-1)),
        "of at least 0, got -1 s",
        "timeout",
    ),
]


def of_nobody(method: str, request: Any) -> list[Bad]:
    """Returns requests about parameters that do not exist, of another incarnation, and for another server."""
    return [
        Bad(method, without(request, parameters=ref("nobody's")), "nobody's", "parameters.name", NOT_FOUND),
        Bad(method, without(request, parameters=ref(incarnation="x")), "net", "parameters.incarnation", NOT_FOUND),
        Bad(method, without(request, parameters=ref("")), "got an empty one", "parameters.name"),
        Bad(method, without(request, parameters=ref("x" * 1025)), "at most 1024 bytes", "parameters.name"),
        Bad(method, without(request, parameters=ref(member="x 0/2")), "in no cluster", "parameters.member"),
        Bad(
            method,
            without(request, parameters=ref(server_incarnation="x")),
            "was started again",
            "parameters.server_incarnation",
            ABORTED,
        ),
    ]


UNKNOWN = [
    *[
        Bad(method, request(parameters=ref(), update=[packed_component(**how)]), message, f"update[0].packed.{field}")
        for method, request in (("Push", Push), ("PushPullParameters", PushPull))
        for how, message, field in (
            ({"codec": 99}, "expected a known codec, got 99", "codec"),
            ({"codec": 0}, "expected a known codec, got 0", "codec"),
            ({"data": tensor([1.0, 2.0])}, "expected dtype uint8, got float32", "data.dtype"),
            ({"data": tensor(np.zeros((2, 2)), np.uint8)}, "expected one dimension", "data.shape"),
            ({"data": tensor_pb2.Tensor()}, "expected content or a handle", "data"),
            ({"data": tensor(np.zeros(5), np.uint8)}, "values as int8, got 5", "data"),
            ({"codec": 1, "data": tensor([0x80, 0x7F] * 6, np.uint8)}, "expected finite values", "data"),
        )
    ],
    Bad(
        "Push",
        Push(parameters=ref(), update=[packed_component()], sum_of=[accumulator_pb2.Summand()]),
        "expected a dense or a sparse value, got a packed one",
        "update[0].packed",
    ),
    Bad("ReadParameters", Read(parameters=ref(), **unknown("codec")), "expected a codec for versions", "codec"),
    Bad("ReadParameters", Read(parameters=ref(), codec="CODEC_TOPK"), "topk, which is for updates only", "codec"),
    Bad(
        "ReadParameters",
        Read(parameters=ref(), codec="CODEC_BF16", with_state=True),
        "none with with_state, got bf16",
        "codec",
    ),
    Bad(
        "PushPullParameters",
        PushPull(parameters=ref(), update=values(), codec="CODEC_TOPK"),
        "for updates only",
        "codec",
    ),
    *of_nobody("GetParameters", Get()),
    *of_nobody("ReadParameters", Read()),
    *of_nobody("Push", Push(update=values())),
    *of_nobody("PushPullParameters", PushPull(update=values())),
    *of_nobody("ChangeParameters", Change()),
    *of_nobody("ListRounds", Rounds()),
    *of_nobody("ReportEvaluation", Report(metrics={"loss": 1.0})),
    *of_nobody("ListEvaluations", Evaluations()),
    *of_nobody("ForkParameters", Fork(fork=ref("fork"))),
    Bad("CreateParameters", create("bad", values=[]), "create them with values", "parameters.name", NOT_FOUND),
    Bad("CreateParameters", create(""), "got an empty one", "parameters.name"),
    bad_create("expected at most 128 bytes, got 129", "creator", creator=129 * "c"),
    Bad("DeleteParameters", Delete(), "got an empty one", "parameters.name"),
    Bad("ForkParameters", Fork(parameters=ref(), fork=ref("")), "got an empty one", "fork.name"),
    Bad("ForkParameters", Fork(parameters=ref(), fork=ref("x" * 1025)), "at most 1024 bytes", "fork.name"),
    Bad("ForkParameters", Fork(parameters=ref(), fork=ref("fork"), step=9), "expected a step", "step", OUT_OF_RANGE),
    Bad(
        "ForkParameters", Fork(parameters=ref(), fork=ref("fork"), step=-1), "of step -1 is kept", "step", OUT_OF_RANGE
    ),
    Bad(
        "ForkParameters",
        Fork(parameters=ref(), fork=ref("fork"), lifetime=lease_pb2.Lifetime(idle_lease=Duration())),
        "expected a positive idle_lease",
        "lifetime.idle_lease",
    ),
    Bad("ListParameters", List(page_size=-1), "of at least 0", "page_size"),
    Bad("ListParameters", List(page_token="?"), "next_page_token", "page_token"),
]

BAD_PARAMETERS = [*BAD_SPECS, *BAD_VERSIONS, *BAD_CHANGES, *BAD_REPORTS, *BAD_UPDATES, *BAD_WAITS, *UNKNOWN]
