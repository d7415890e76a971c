"""Documents as a server with much to do gives them."""

import random
from dataclasses import replace

from gradserve_protocol.server_status import (
    AccumulatorStatus,
    ArrivalStatus,
    ErrorStatus,
    EvaluationStatus,
    GradientTotals,
    LayerStatus,
    MemoryStatus,
    MethodStatus,
    ParametersStatus,
    RoundStatus,
    ServerStatus,
    TrafficStatus,
    WeightStatus,
)

ROUND_SECONDS = 1.6


def accumulator(name: str, num_workers: int, uptime: float, *, container: str = "default") -> AccumulatorStatus:
    """An accumulator whose last worker is slow, and whose last but one comes too late or not at all.

    Its current round has everybody but the slow one.
    """
    chance = random.Random(f"{name} {int(uptime / ROUND_SECONDS)}")
    workers = [f"worker-{number:03}" for number in range(num_workers)]
    step = int(uptime / ROUND_SECONDS)
    rounds = [_round(workers, step - back, (step - back) * ROUND_SECONDS, chance) for back in range(19, 0, -1)]
    present = [ArrivalStatus(worker, chance.uniform(0, 0.4)) for worker in workers[:-2]]
    present.sort(key=lambda each: each.after)
    opened = RoundStatus(
        step, step * ROUND_SECONDS, 0.0, num_workers - 1, (ArrivalStatus(workers[0]), *present[1:]), (workers[-1],)
    )
    return AccumulatorStatus(
        container=container,
        name=name,
        global_step=step - 1,
        num_rounds=step - 1,
        rounds_per_second=1 / ROUND_SECONDS,
        num_accumulated=num_workers - 2,
        num_required=num_workers - 1,
        num_waiting=num_workers - 2,
        num_bytes=102_228_128,
        accepted=step * (num_workers - 1),
        stale=step // 3,
        duplicate=4,
        refused=2,
        median_round_seconds=1.31,
        workers=tuple(each.worker_id for each in opened.arrivals),
        missing=(workers[-1],),
        rounds=(*rounds, opened),
    )


def _round(workers: list[str], step: int, began: float, chance: random.Random) -> RoundStatus:
    arrivals = [ArrivalStatus(worker, chance.betavariate(2, 7)) for worker in workers[:-2]]
    slow, flaky = workers[-1], workers[-2]
    slow_after = 1.05 + 0.3 * chance.random()
    late = step % 3 == 0
    if step % 7 != 0:
        arrivals.append(ArrivalStatus(flaky, slow_after + 0.15, stale=True) if late else ArrivalStatus(flaky, 0.6))
    arrivals.append(ArrivalStatus(slow, slow_after))
    arrivals.sort(key=lambda each: (each.stale, each.after))
    arrivals[0] = replace(arrivals[0], after=0.0)
    return RoundStatus(
        step, began, began + slow_after + 0.002, len(workers) - 1, tuple(arrivals), (flaky,) if step % 7 == 0 else ()
    )


def idle(name: str, number: int) -> AccumulatorStatus:
    """An accumulator in which little happens."""
    return AccumulatorStatus(
        container="default",
        name=name,
        global_step=number % 97,
        num_rounds=number % 97,
        num_bytes=4096 * (1 + number % 50),
        accepted=4 * (number % 97),
    )


def parameters(name: str, num_workers: int, uptime: float) -> ParametersStatus:
    """Parameters with the rounds of such an accumulator, which end by their deadline; the first worker is stale."""
    like = accumulator(name, num_workers, uptime)
    rounds = [
        replace(
            each,
            reason="deadline" if each.ended else "",
            apply_seconds=0.02 if each.ended else 0.0,
            arrivals=(replace(each.arrivals[0], staleness=2), *each.arrivals[1:]),
            metrics={"accuracy": 0.9 - 0.4 / (3 + number), "loss": 2.0 / (2 + number)} if each.ended else {},
        )
        for number, each in enumerate(like.rounds)
    ]
    evaluated = list(enumerate(rounds[:-1]))[::4]
    return ParametersStatus(
        container=like.container,
        name=name,
        step=like.global_step,
        num_rounds=like.num_rounds,
        rounds_per_second=like.rounds_per_second,
        num_updates=like.num_accumulated,
        num_required=like.num_required,
        num_waiting=like.num_waiting,
        num_bytes=like.num_bytes,
        accepted=like.accepted,
        stale=like.stale,
        median_round_seconds=like.median_round_seconds,
        workers=like.workers,
        missing=like.missing,
        rounds=tuple(rounds),
        gone=("worker-900",),
        optimizer="sgd(lr=0.7, momentum=0.9, nesterov=True)",
        learning_rate=0.35,
        rules=f"{like.num_required} updates, deadline 2 s",
        weights=WeightStatus(64.0, 48.0, 14.0, 2.0, {"stale": 3.0, "already counted": 1.0}),
        num_counted=num_workers - 1,
        num_live=num_workers,
        num_ended={"required": 7, "deadline": 12},
        evaluations=tuple([EvaluationStatus(each.step, {"loss": 2.25 / (2 + at)}) for at, each in evaluated]),
    )


def document(uptime: float, *, num_accumulators: int = 6, num_workers: int = 16) -> ServerStatus:
    """A server that has been up for so long."""
    named = ["resnet50/gradients", "resnet50/batch-norm", "embedding/rows", "optimizer/second-moments", "eval/metrics"]
    described = [accumulator(named[0], num_workers, uptime)]
    described += [
        replace(accumulator(each, 4, uptime + 0.3), num_bytes=9_600_000, rounds_per_second=0.31) for each in named[1:3]
    ]
    described += [idle(each, number) for number, each in enumerate(named[3:])]
    described += [idle(f"sweep/run-{number:04}", number) for number in range(num_accumulators - len(described))]
    calls = int(uptime * 40)
    return ServerStatus(
        version="0.9.0",
        incarnation="f3a9",
        uptime=uptime,
        device="cuda:0",
        ops_prepared=True,
        num_accumulators=len(described),
        accumulators=tuple(described),
        parameters=(parameters("llm/outer", 4, uptime),),
        num_parameters=1,
        traffic=(
            TrafficStatus("grpc", int(uptime * 91_000), int(uptime * 120_000), int(uptime * 11)),
            TrafficStatus("bulk", int(uptime * 211_000_000), int(uptime * 198_000_000), int(uptime * 22)),
            TrafficStatus("shared_memory", int(uptime * 52_000_000), int(uptime * 51_000_000), int(uptime * 9)),
        ),
        memory=(
            MemoryStatus("tensors", 1_280_000_000, 8_000_000_000),
            MemoryStatus("accumulators", 420_000_000, 0),
            MemoryStatus("uploads", 96_000_000, 2_000_000_000),
            MemoryStatus("regions", 640_000_000, 0),
            MemoryStatus("layers", 22_000_000, 0),
        ),
        layers=tuple(LayerStatus("default", f"resnet50/bn{at}", at % 3, 82_000 * at) for at in range(1, 9)),
        methods=(
            _method("AccumulatorService", "PushPull", calls, 96.0, 5120.0, in_progress=14),
            _method("AccumulatorService", "ApplyGradient", calls // 2, 22.0, 0.0, {"INVALID_ARGUMENT": 2}),
            _method("AccumulatorService", "TakeGradient", calls // 9, 6.0, 800.0, {"DEADLINE_EXCEEDED": 31}),
            _method("GradientOpsService", "FusedBatchNormGrad", calls // 5, 41.0, 0.0),
            _method("GradientOpsService", "GRUBlockCell", calls // 7, 18.2, 0.0),
            _method("TensorService", "PutTensors", calls // 30, 31.5, 0.0, {"RESOURCE_EXHAUSTED": 3}),
            _method("ServerService", "GetServerInfo", 88, 0.02, 0.0),
        ),
        errors=(
            _error("TakeGradient", "DEADLINE_EXCEEDED", "15 of 16 gradients; missing: worker-015", 31, uptime - 44),
            _error("PutTensors", "RESOURCE_EXHAUSTED", "needs 4.2 GB, and 3.1 GB of 8 GB are left", 3, uptime - 610),
            _error("ApplyGradient", "INVALID_ARGUMENT", "expected shape (64, 3), got (64,)", 2, uptime - 4025),
        ),
        totals=GradientTotals(
            accepted=int(uptime * 10),
            stale=int(uptime / 5),
            duplicate=4,
            refused=2,
            accepted_bytes=int(uptime * 2e8),
            rounds=int(uptime / ROUND_SECONDS * 3),
        ),
    )


def _error(method: str, code: str, message: str, count: int, at: float) -> ErrorStatus:
    return ErrorStatus(f"/gradserve.v1.AnyService/{method}", code, message, count, at)


def _method(
    service: str,
    method: str,
    calls: int,
    working: float,
    waiting: float,
    failed: dict[str, int] | None = None,
    *,
    in_progress: int = 0,
) -> MethodStatus:
    handled = {"OK": calls - in_progress, **(failed or {})}
    started = sum(handled.values()) + in_progress
    return MethodStatus(f"gradserve.v1.{service}", method, started, in_progress, handled, working, waiting)
