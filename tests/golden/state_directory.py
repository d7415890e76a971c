"""What the recorded state directories hold: one of each kind of thing that a server keeps."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import gradserve
from gradserve_protocol.v1 import accumulator_messages_pb2 as messages_pb2
from gradserve_protocol.v1 import accumulator_pb2, tensor_pb2
from gradserve_server.accumulators.gradient import Contribution
from gradserve_server.accumulators.identity import RequestId
from gradserve_server.config import RuntimeConfig, ServerConfig, StateConfig
from gradserve_server.parameters.changes import Changes
from gradserve_server.parameters.optimizers.optimizer import Schedule, ScheduleKind
from gradserve_server.parameters.parameters import Parameters
from gradserve_server.parameters.reductions.spec import Krum
from gradserve_server.parameters.round_rules import PolynomialDiscount, RoundRules, Staleness
from gradserve_server.parameters.spec import UpdateKind
from gradserve_server.resources.registry import ResourceKey
from gradserve_server.storage.journal import Durability
from tests.parameters.bench import adam, opened, push, sgd
from tests.parameters.durable.disk import Disk

FOLDER = Path(__file__).parent

APPLY = messages_pb2.ApplyGradientRequest(
    accumulator=accumulator_pb2.AccumulatorRef(container="c", name="model"),
    request_id=accumulator_pb2.RequestId(client_id="worker", sequence=7),
    local_step=1,
    weight=0.5,
    worker_id="w7",
    gradient=[
        accumulator_pb2.ComponentGradient(
            name="w",
            dense=tensor_pb2.Tensor(
                dtype=tensor_pb2.DATA_TYPE_FLOAT32, shape=[3], content=np.array([1, 2, 3], np.float32).tobytes()
            ),
        ),
        accumulator_pb2.ComponentGradient(
            name="b",
            sparse=accumulator_pb2.SparseGradient(
                indices=tensor_pb2.Tensor(
                    dtype=tensor_pb2.DATA_TYPE_INT64, shape=[1], content=np.array([5], np.int64).tobytes()
                ),
                values=tensor_pb2.Tensor(
                    dtype=tensor_pb2.DATA_TYPE_FLOAT64, shape=[1, 2], content=np.array([[7, 8]], np.float64).tobytes()
                ),
            ),
        ),
    ],
)
"""A call with an id, which the directory remembers."""

X = np.arange(12, dtype=np.float32).reshape(4, 3)


def archive_of(version: int) -> Path:
    """Returns the file of a directory in one format."""
    return FOLDER / f"state_format_{version}.tar.xz"


def config_of(directory: Path) -> ServerConfig:
    """Returns the configuration of a server on a state directory."""
    state = StateConfig(state_dir=str(directory), durability="gradient")
    return ServerConfig(state=state, runtime=RuntimeConfig(warm_up=False))


def fill(client: gradserve.Client) -> None:
    """Makes what the directory holds, but for the gradient of `APPLY`."""
    plain = client.conditional_accumulator("bfloat16", (2, 3), shared_name="plain", keep_averages=2)
    for step in range(3):
        plain.apply_grad(np.full((2, 3), step, ml_dtypes.bfloat16), local_step=step)
        plain.take_grad(1)
    rows = gradserve.IndexedSlices(np.ones((1, 2)), np.array([5]))
    template = {"w": np.ones(3, np.float32), "b": gradserve.SparseSpec("float64")}
    model = client.gradient_accumulator(template, shared_name="model", container="c", deterministic=True)
    model.apply_grad({"w": np.ones(3, np.float32), "b": rows}, worker_id="w1")
    model.take_grad(1)
    counter = client.conditional_accumulator("float64", (), shared_name="counter", durability="round")
    counter.set_global_step(41)
    layer = client.batch_norm(scope="bn", container="c", scale=True)
    layer.forward(X)
    layer.run_updates()
    layer.forward(2 * X, forward_id="second")


FIRST_WITH_PARAMETERS = 4
LLM, KRUM = ResourceKey("default", "llm"), ResourceKey("c", "krum")
UPDATE: dict[str, Any] = {"w": np.array([4, 8, 12], np.float32), "h": np.array([[1.0, 2.0]], ml_dtypes.bfloat16)}
PUSHED = RequestId("worker", 9, b"content")


async def fill_parameters(directory: Path) -> None:
    """Adds parameters: one with versions, an update in its round, and other rules for the next; one that holds them."""
    disk = await Disk.open(directory, Durability.GRADIENT)
    llm = await disk.parameters(
        {name: np.zeros_like(each) for name, each in UPDATE.items()},
        key=LLM,
        optimizer=adam(lr=0.5),
        schedule=Schedule(ScheduleKind.COSINE, warmup=1, rounds=8, end=0.125),
        rounds={"num_required": 2, "grace": "adaptive", "max_grace": 30.0, "expected": "alive", "deadline": 600.0},
        staleness=Staleness(2, PolynomialDiscount(0.5)),
        keep_versions=3,
    )
    for number in range(4):
        disk.bench.now += 1.0
        await push(llm, UPDATE, 0, call=RequestId("worker", number), worker_id=f"w{number % 2}", weight=1.0 + number)
        disk.bench.now += 30.0
        llm.go_on()
    await push_again(llm)
    await llm.change(RequestId("chief", 1), Changes(sgd(lr=0.25, momentum=0.5), Schedule(), RoundRules(2)))
    krum = await disk.parameters(
        key=KRUM,
        update=UpdateKind.GRADIENT,
        reduction=Krum(0),
        clip_norm=3.0,
        deterministic=True,
        rounds={"num_required": 3},
        durability=Durability.ROUND,
        agreement={"run": "7"},
        keep_rounds=5,
    )
    for number in range(4):
        await push(krum, {"w": [number, 1]}, worker_id=f"w{number}")
    disk.close()


async def push_again(llm: Parameters) -> tuple[Any, bool]:
    """Makes a call that the directory remembers."""
    return await llm.push(PUSHED, Contribution(1, worker_id="w2", sequence=3), opened(UPDATE))
