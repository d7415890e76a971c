"""Requests of very many components and rounds of parameters: the event loop goes on meanwhile."""

from typing import Any

from gradserve_server.limits import MAX_METRICS
from tests.bad_input.requests import component, dense, identity, zeros
from tests.floods.servicers import PARTS, Servicers
from tests.floods.test_components import KEEP, NAMES
from tests.rpc.parameters.requests import (
    MOMENTUM,
    Change,
    Evaluations,
    Fork,
    Get,
    List,
    Read,
    Report,
    Rounds,
    create,
    push,
    push_pull,
    ref,
    spec,
)

VALUES = [dense(zeros(1), name) for name in NAMES]


async def test_a_model_of_many_components(servicers: Servicers) -> None:
    async def call(method: str, request: Any) -> Any:
        return await servicers.call(method, request, "ParameterService")

    many = spec(*[component(name, dims=[1]) for name in NAMES], optimizer=MOMENTUM)
    made = create(spec=many, values=VALUES)
    assert (await call("CreateParameters", made)).created
    assert not (await call("CreateParameters", made)).created
    info = (await call("GetParameters", Get(parameters=ref()))).info
    assert [each.name for each in info.spec.components] == NAMES
    await call("ListParameters", List())
    assert (await call("Push", push(sequence=1, update=VALUES))).num_updates == 1
    assert (await call("Push", push(sequence=2, update=VALUES[: PARTS // 2], local_step=1))).num_updates == 1
    pulled = await call("PushPullParameters", push_pull(update=VALUES, local_step=2, placement=KEEP))
    assert [each.name for each in pulled.message.version.components] == NAMES
    read = await call("ReadParameters", Read(parameters=ref(), placement=KEEP, with_state=True))
    assert len(read.message.version.components) == len(read.message.version.state.slots) == PARTS
    state = (await call("ReadParameters", Read(parameters=ref(), with_state=True, without_values=True))).message
    change = Change(parameters=ref(), values=VALUES, state=state.version.state, request_id=identity(3))
    assert (await call("ChangeParameters", change)).info.step == 4
    fork = Fork(parameters=ref(), fork=ref("fork"))
    assert len((await call("ForkParameters", fork)).info.spec.components) == PARTS


async def test_many_updates_in_records(servicers: Servicers) -> None:
    async def call(method: str, request: Any) -> Any:
        return await servicers.call(method, request, "ParameterService")

    per_round = PARTS // 10
    await call(
        "CreateParameters",
        create(spec=spec(component("w", dims=[1]), rounds={"num_required": per_round}), values=[dense(zeros(1), "w")]),
    )
    for step in range(10):
        for number in range(per_round):
            await call("Push", push(worker_id=f"worker {number}", local_step=step, update=[dense(zeros(1))]))
    found = await call("ListRounds", Rounds(parameters=ref()))
    assert found.has_more
    assert sum([len(each.updates) for each in found.rounds]) <= 1 << 12


async def test_many_metrics_and_reports(servicers: Servicers) -> None:
    async def call(method: str, request: Any) -> Any:
        return await servicers.call(method, request, "ParameterService")

    metrics = {f"metric {number}": 1.0 for number in range(MAX_METRICS)}
    await call("CreateParameters", create(spec=spec(component("w", dims=[1])), values=[dense(zeros(1), "w")]))
    for step in range(200):
        await call("Push", push(local_step=step, update=[dense(zeros(1))], metrics=metrics))
        await call("ReportEvaluation", Report(parameters=ref(), step=step, metrics=metrics, worker_id="w"))
    for number in range(PARTS // 10):
        await call("ReportEvaluation", Report(parameters=ref(), step=200, metrics=metrics, worker_id=f"w{number}"))
    found = await call("ListRounds", Rounds(parameters=ref()))
    assert found.has_more
    assert all(len(each.metrics) == MAX_METRICS for each in found.rounds)
    listed = await call("ListEvaluations", Evaluations(parameters=ref(), since=198))
    assert [each.num_reports for each in listed.evaluations] == [1, PARTS // 10]
