"""A picture of a server at work, as `client.server_status()` returns it and the status page shows it.

Times are in seconds of the server's uptime: `status.uptime - round.ended` is how long ago a round ended. Counts are
those since the server started. See status_messages.proto for each value.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ArrivalStatus:
    """A gradient of a round.

    Attributes:
        worker_id: Its sender; empty if that has no id.
        after: Seconds after the first gradient of the round.
        stale: Whether it came too late, and was dropped.
        staleness: Of an update of parameters that counts: how many versions had been made since the one from which it
            was computed.
    """

    worker_id: str = ""
    after: float = 0.0
    stale: bool = False
    staleness: int = 0


@dataclass(frozen=True)
class RoundStatus:
    """A round.

    Attributes:
        step: The global_step that it led to, or will lead to.
        began: When its first gradient arrived.
        ended: When it ended; 0 for the current round.
        num_required: The number of gradients that it needed, or needs.
        arrivals: Its gradients in order of arrival, and those that came too late.
        missing: The workers of the round before that are not in this one.
        reason: Why a round of parameters ended: "required", "grace", "expected" or "deadline"; empty for other rounds.
        apply_seconds: Seconds that the optimizer of parameters took.
        metrics: The means of what the workers of parameters have measured, by name.
    """

    step: int = 0
    began: float = 0.0
    ended: float = 0.0
    num_required: int = 0
    arrivals: tuple[ArrivalStatus, ...] = ()
    missing: tuple[str, ...] = ()
    reason: str = ""
    apply_seconds: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class AccumulatorStatus:
    """An accumulator.

    Attributes:
        container: Its container.
        name: Its name.
        global_step: Its step.
        num_rounds: The rounds that have ended.
        rounds_per_second: An average over about ten seconds.
        num_accumulated: The gradients in the current round.
        num_required: The gradients that the first waiting call needs; 0 if none waits.
        num_waiting: The calls that wait.
        num_bytes: The memory of its sum and its averages.
        accepted: Gradients that joined a round.
        stale: Gradients of an earlier step, which were dropped.
        duplicate: Gradients that were there already.
        refused: Gradients that were not valid, or for which there was no room.
        median_round_seconds: From the first gradient of a round to its end, over `rounds`; 0 without any.
        workers: The workers with gradients in the current round, at most 500.
        missing: The workers of the previous round without one, at most 500.
        different: The workers whose parameters are not those of most, at most 500: each with the latest step at which
            they were, -1 for no step that is remembered.
        num_compared: The workers whose parameters the latest comparison has compared; 0 before the first. All of them
            but `different` have the same.
        compared_step: The step of the parameters that it has compared; 0 before the first.
        different_since: For each worker in `different`, the step of the first comparison since which it always was.
        rounds: The last rounds, oldest first, and the current one if it has gradients.
    """

    container: str = ""
    name: str = ""
    global_step: int = 0
    num_rounds: int = 0
    rounds_per_second: float = 0.0
    num_accumulated: int = 0
    num_required: int = 0
    num_waiting: int = 0
    num_bytes: int = 0
    accepted: int = 0
    stale: int = 0
    duplicate: int = 0
    refused: int = 0
    median_round_seconds: float = 0.0
    workers: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    different: Mapping[str, int] = field(default_factory=dict)
    num_compared: int = 0
    compared_step: int = 0
    different_since: Mapping[str, int] = field(default_factory=dict)
    rounds: tuple[RoundStatus, ...] = ()


@dataclass(frozen=True)
class WeightStatus:
    """The weight of updates: accepted = applied + pending + dropped, but for the rounding of sums.

    Attributes:
        accepted: The weight of all updates that counted when they came.
        applied: That of updates in versions.
        pending: That of updates in the current round.
        dropped: That of updates that were dropped when other values were loaded.
        refused: The weight that was never accepted, by reason: "stale", "already counted".
    """

    accepted: float = 0.0
    applied: float = 0.0
    pending: float = 0.0
    dropped: float = 0.0
    refused: Mapping[str, float] = field(default_factory=dict)

    @property
    def lost(self) -> float:
        """The accepted weight that is nowhere: 0, but for the rounding of sums."""
        return self.accepted - (self.applied + self.pending + self.dropped)


@dataclass(frozen=True)
class EvaluationStatus:
    """The measurements of a version of parameters.

    Attributes:
        step: The step of the version.
        metrics: The means of all reports on it, by name.
    """

    step: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ParametersStatus:
    """Parameters that the server holds. Weights are those since their creation.

    Attributes:
        container: Their container.
        name: Their name.
        step: The step of the newest version.
        num_rounds: The rounds that have ended.
        rounds_per_second: An average over about ten seconds.
        num_updates: The updates in the current round.
        num_required: The updates that end it, apart from the other rules.
        num_waiting: The calls that wait.
        num_bytes: The memory of the versions, the optimizer's state and the updates.
        accepted: Updates that joined a round.
        stale: Updates that were computed from too old a version, and were dropped.
        duplicate: Updates that were there already.
        refused: Updates that were not valid, or for which there was no room.
        median_round_seconds: From the first update of a round to its end, over `rounds`; 0 without any.
        workers: The workers with updates in the current round, at most 500.
        missing: The workers of the last two rounds without one whose clients are there, at most 500.
        rounds: The last rounds, oldest first, and the current one if it has updates.
        gone: The workers of the last two rounds without an update whose clients are gone, at most 500.
        optimizer: The optimizer in words, such as "sgd(lr=0.7, momentum=0.9)".
        learning_rate: The learning rate of the current round, after the schedule.
        rules: The rules for the end of the current round in words, such as "3 updates, grace 2 s".
        weights: Where all weight went.
        num_counted: The workers with an update in the latest round; 0 if there was none since the server started, or
            none of its workers has an id.
        num_live: The workers that lived at its end: these, and others of the two rounds before it whose clients were
            there.
        num_ended: The rounds since the server started, by the reason of their end.
        evaluations: The last evaluations of versions, by step; at most 20.
    """

    container: str = ""
    name: str = ""
    step: int = 0
    num_rounds: int = 0
    rounds_per_second: float = 0.0
    num_updates: int = 0
    num_required: int = 0
    num_waiting: int = 0
    num_bytes: int = 0
    accepted: int = 0
    stale: int = 0
    duplicate: int = 0
    refused: int = 0
    median_round_seconds: float = 0.0
    workers: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    rounds: tuple[RoundStatus, ...] = ()
    gone: tuple[str, ...] = ()
    optimizer: str = ""
    learning_rate: float = 0.0
    rules: str = ""
    weights: WeightStatus = field(default_factory=WeightStatus)
    num_counted: int = 0
    num_live: int = 0
    num_ended: Mapping[str, int] = field(default_factory=dict)
    evaluations: tuple[EvaluationStatus, ...] = ()


@dataclass(frozen=True)
class WorkerStatus:
    """A worker in the rounds of a status.

    Attributes:
        worker_id: Its id.
        rounds: How many of the rounds it is in.
        mean_lateness: Seconds after the first gradient of the round, on average.
        times_last: In how many rounds it came last.
        waited_for: Seconds that rounds had all gradients but its own.
        stale: Its gradients that came too late.
        missed: Rounds that it was not in, after one that it was in.
        last_seen: When its latest gradient came.
    """

    worker_id: str = ""
    rounds: int = 0
    mean_lateness: float = 0.0
    times_last: int = 0
    waited_for: float = 0.0
    stale: int = 0
    missed: int = 0
    last_seen: float = 0.0


@dataclass(frozen=True)
class TrafficStatus:
    """The traffic over one transport.

    Attributes:
        way: "grpc", "bulk" or "shared_memory".
        received_bytes: Bytes of requests.
        sent_bytes: Bytes of replies.
        calls: The number of calls.
    """

    way: str = ""
    received_bytes: int = 0
    sent_bytes: int = 0
    calls: int = 0


@dataclass(frozen=True)
class MemoryStatus:
    """Memory in use for one purpose.

    Attributes:
        purpose: What it is for.
        num_bytes: The bytes in use.
        max_bytes: The limit; 0 if it has none of its own.
    """

    purpose: str = ""
    num_bytes: int = 0
    max_bytes: int = 0


@dataclass(frozen=True)
class LayerStatus:
    """A batch normalization layer.

    Attributes:
        container: Its container.
        name: Its name.
        num_forwards: The forwards that wait for their backward pass.
        num_bytes: The memory of its variables and forwards.
    """

    container: str = ""
    name: str = ""
    num_forwards: int = 0
    num_bytes: int = 0


@dataclass(frozen=True)
class MethodStatus:
    """The calls of one method.

    Attributes:
        service: The full name of its service, e.g. "gradserve.v1.AccumulatorService".
        method: Its name.
        started: The number of calls.
        in_progress: The number of calls that have not ended.
        handled: The number of calls that have ended, by the name of the status code, e.g. "OK".
        working_seconds: Seconds that the server worked on them, without waits for other workers.
        waiting_seconds: Seconds that they waited for other workers.
    """

    service: str = ""
    method: str = ""
    started: int = 0
    in_progress: int = 0
    handled: Mapping[str, int] = field(default_factory=dict)
    working_seconds: float = 0.0
    waiting_seconds: float = 0.0


@dataclass(frozen=True)
class ErrorStatus:
    """An error that calls have ended with.

    Attributes:
        method: The full name of their method.
        code: The name of the status code, e.g. "NOT_FOUND".
        message: The message of the latest, shortened.
        count: The number of such calls.
        at: When the latest happened.
    """

    method: str = ""
    code: str = ""
    message: str = ""
    count: int = 0
    at: float = 0.0


@dataclass(frozen=True)
class GradientTotals:
    """The gradients and rounds of all accumulators, or the updates and rounds of all parameters; deleted ones, too.

    Attributes:
        accepted: Gradients that joined a round.
        stale: Gradients that came too late.
        duplicate: Gradients that were there already.
        refused: Gradients that were not valid, or for which there was no room.
        accepted_bytes: The bytes of accepted gradients.
        rounds: The rounds that have ended.
    """

    accepted: int = 0
    stale: int = 0
    duplicate: int = 0
    refused: int = 0
    accepted_bytes: int = 0
    rounds: int = 0


@dataclass(frozen=True)
class RequestStatus:
    """The knowledge that an accumulator or parameters have of a call.

    Attributes:
        container: Its container.
        name: Its name.
        kind: "accumulator" or "parameters".
        outcome: "accepted", "stale" or "already_counted" for a gradient or an update; "dropped" if it was accepted, and
            its round has ended without it; "done" for any other call; "waiting" for a take that waits for gradients;
            "forgotten" if the number is older than those that are remembered of its client here.
        step: The step that its round led to; 0 while the round is open, and without one.
    """

    container: str = ""
    name: str = ""
    kind: str = ""
    outcome: str = ""
    step: int = 0


@dataclass(frozen=True)
class PastRun:
    """An accumulator or parameters that are gone. Times are in seconds since 1970.

    Attributes:
        kind: "accumulator" or "parameters".
        container: The container.
        name: The name.
        incarnation: The incarnation.
        begun: When it was created.
        ended: When it ended; 0 if nobody knows, as the server has crashed.
        step: Its step at the end; 0 if nobody knows.
        metrics: The means of what the workers of parameters had measured in the latest round, by name.
        reason: Why it ended: "deleted", or a sentence.
    """

    kind: str = ""
    container: str = ""
    name: str = ""
    incarnation: str = ""
    begun: float = 0.0
    ended: float = 0.0
    step: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""


@dataclass(frozen=True)
class ServerStatus:
    """A server at work.

    Attributes:
        version: The version of its gradserve distribution.
        incarnation: A random id of this run of the server.
        uptime: Seconds since it started.
        device: The device that ops run on, e.g. "cpu" or "cuda:0".
        ops_prepared: False while kernels that calls have asked for are being loaded or compiled.
        num_accumulators: How many accumulators there are that were asked for.
        accumulators: The first of them, in the order asked for.
        workers: The workers in the rounds of these and of `parameters`, those for which others wait longest first.
        traffic: What came and went, by way.
        memory: What is in use, by purpose.
        layers: Batch normalization layers, at most 1,000.
        methods: The methods that were called.
        errors: The latest error of each method and code, the newest first; only for admins of all containers.
        totals: The gradients and rounds of all accumulators.
        num_layers: How many layers there are that were asked for.
        parameters: The first parameters that were asked for.
        num_parameters: How many parameters there are that were asked for.
        update_totals: The updates and rounds of all parameters.
        requests: Where the call with the request id that was asked for is known, at most 100 places.
        past_runs: Accumulators and parameters that are gone, the latest to end first, as many as were asked for.
    """

    version: str = ""
    incarnation: str = ""
    uptime: float = 0.0
    device: str = ""
    ops_prepared: bool = False
    num_accumulators: int = 0
    accumulators: tuple[AccumulatorStatus, ...] = ()
    workers: tuple[WorkerStatus, ...] = ()
    traffic: tuple[TrafficStatus, ...] = ()
    memory: tuple[MemoryStatus, ...] = ()
    layers: tuple[LayerStatus, ...] = ()
    methods: tuple[MethodStatus, ...] = ()
    errors: tuple[ErrorStatus, ...] = ()
    totals: GradientTotals = field(default_factory=GradientTotals)
    num_layers: int = 0
    parameters: tuple[ParametersStatus, ...] = ()
    num_parameters: int = 0
    update_totals: GradientTotals = field(default_factory=GradientTotals)
    requests: tuple[RequestStatus, ...] = ()
    past_runs: tuple[PastRun, ...] = ()


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line of a server's log.

    Attributes:
        number: Its number, from 1 on.
        time: When it was written, in seconds since 1970.
        level: Its level, e.g. "WARNING".
        logger: The name of its logger.
        message: Its message with any traceback; at most 4,000 characters, longer ones are cut.
        request_id: The id of the call that it is about; empty if it is about none.
    """

    number: int = 0
    time: float = 0.0
    level: str = ""
    logger: str = ""
    message: str = ""
    request_id: str = ""


@dataclass(frozen=True)
class ServerLog:
    """Lines of a server's log.

    Attributes:
        lines: The lines, the oldest first.
        incarnation: A random id of this run of the server: each numbers its lines from 1 on.
    """

    lines: tuple[LogLine, ...] = ()
    incarnation: str = ""
