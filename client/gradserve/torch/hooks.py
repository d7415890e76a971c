"""Hooks that average gradients: one for DistributedDataParallel, and one for FSDP2's shards over replicas."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Literal

import torch

from gradserve.client import Client
from gradserve.errors import AbortedError, InvalidArgumentError
from gradserve.results import DenseSpec
from gradserve.torch.backward_pass import BackwardPass, Group, GroupAverage, groups_of
from gradserve.torch.parameters import trained_parameters
from gradserve.torch.tensors import tensor_of
from gradserve.training.rounds import IDLE_SECONDS, PRESENCE, Membership, Rounds, presence_spec

_ONLY = "gradients"
"""The only component of the accumulators of FSDP2's hook."""


def comm_hook(
    client: Client,
    model: torch.nn.Module,
    *,
    num_required: int,
    name: str,
    worker_id: str | None = None,
    step: int = 0,
    keep_averages: int = 4,
    timeout: float | None = None,
    container: str = "",
    refuse_non_finite: bool = True,
    durability: str | None = None,
    idle_lease: float | None = IDLE_SECONDS,
    if_exists: Literal["join", "error"] = "join",
) -> "CommHook":
    """Returns a hook that averages the gradients of a DistributedDataParallel over the workers of a run.

        replica = torch.nn.parallel.DistributedDataParallel(model)  # over a process group of size 1
        replica.register_comm_hook(None, gradserve.torch.comm_hook(client, replica, num_required=4, name="net"))

    Gradients are averaged by parameter, in groups that depend on the model alone, so workers need not have the same
    buckets, and nothing has to come in the same order. All groups of a backward pass are under way at once, in threads,
    while the pass goes on; it ends when all averages are in.

    The workers must begin with equal weights: `gradserve.torch.broadcast_parameters` sees to that. A worker whose
    gradients come too late for a round drops them and gets the average that the others got, so weights stay equal.
    `backward()` raises the error of a call. After one, some groups have been averaged and others have not, so the hook
    refuses to go on.

    Args:
        client: The client, which must stay open.
        model: The DistributedDataParallel, or the module in it. Its parameters that require a gradient are averaged.
        num_required: The number of gradients that end a round: the number of workers, or fewer if some are backups.
        name: The name of the run. Its accumulators live until nobody has used them for a day.
        worker_id: This worker's id, different from that of every other worker. None: that of
            GRADSERVE_WORKER_ID, or a new one.
        step: The number of steps of this run that the weights have behind them: 0 for a new run.
        keep_averages: The number of averages that the server keeps: a worker may be late by so many steps.
        timeout: Seconds to wait for other workers; and for a server that is gone, unless GRADSERVE_RESTART_PATIENCE is
            set. None: the client's timeout. math.inf: no limit.
        container: The namespace of the name.
        refuse_non_finite: Whether gradients with infinities or NaN are refused, with an InvalidArgumentError that names
            the parameter. Otherwise they reach all workers, which a GradScaler needs: then all skip the step.
        durability: What the server keeps of the run on its disk, as in `Client.gradient_accumulator`. None: what the
            server was started with.
        idle_lease: Seconds after its last use by a worker at which the run is deleted: a day. None: never.
        if_exists: What to do if a run of this name is further than `step`. "join": log a warning, drop the gradients of
            this worker and get the averages of the run until it has caught up. "error": raise AlreadyExistsError.

    Raises:
        InvalidArgumentError: No parameter requires a gradient, one has a dtype that cannot be averaged, or an argument
            is not valid.
        AlreadyExistsError: Another worker of the run has another model; or see `if_exists`.
        GradserveError: The server cannot be reached, or refuses.
    """
    parameters = trained_parameters(model)
    member = Membership(
        client,
        name,
        num_required,
        worker_id,
        step,
        keep_averages,
        timeout,
        if_exists,
        container=container,
        refuse_non_finite=refuse_non_finite,
        durability=durability,
        idle_lease=idle_lease,
    )
    specs = {key: DenseSpec(parameter.dtype, tuple(parameter.shape)) for key, parameter in parameters.items()}
    member.accumulator("layout", specs)  # holds no gradients: it refuses workers with another model
    averages: dict[Group, GroupAverage] = {}
    for group in groups_of(parameters.items()):
        components = {each: specs[each] for each in group.names}
        components[PRESENCE] = presence_spec(len(group.names))
        rounds = member.rounds(f"gradients-{group.number}", components)
        averages[group] = GroupAverage(rounds, group.names)
    return CommHook(parameters, averages)


class CommHook:
    """A hook for `DistributedDataParallel.register_comm_hook`; see `comm_hook`."""

    def __init__(self, parameters: Mapping[str, torch.Tensor], averages: Mapping[Group, GroupAverage]) -> None:
        self.__name__ = self.__qualname__ = (
            "gradserve.torch.comm_hook"  # DistributedDataParallel asks functions for them
        )
        self._names = {parameter: name for name, parameter in parameters.items()}
        self._averages = averages
        self._used: set[str] = set()
        """The parameters that this worker has used since the last averages; others of a bucket have zeros."""
        for parameter, parameter_name in self._names.items():
            parameter.register_post_accumulate_grad_hook(partial(_note, self._used, parameter_name))
        self._threads = ThreadPoolExecutor(len(averages), thread_name_prefix="gradserve-comm-hook")
        self._pass: BackwardPass | None = None
        self._failure: BaseException | None = None

    @property
    def step(self) -> int:
        """The number of steps of the run that this worker has the averages of."""
        return min(average.step for average in self._averages.values())

    # Without annotations: DistributedDataParallel compares them with its own.
    def __call__(self, state, bucket):  # type: ignore[no-untyped-def]
        """Begins to average the gradients of a bucket.

        Args:
            state: Not used.
            bucket: The torch.distributed.GradBucket.

        Returns:
            A torch.futures.Future of the bucket's buffer with the averages.
        """
        names = [self._names.get(parameter, "") for parameter in bucket.parameters()]
        self._check(bucket.buffer(), names)
        if self._pass is not None and any(map(self._pass.has, names)):
            self._failure = AbortedError(
                "a backward pass ended before all gradients were computed", code="GS_HOOK_BROKEN"
            )
        if self._failure is not None:
            raise AbortedError(
                "the hook cannot go on after an error, as some gradients were averaged and others were not. Give "
                f"the model the weights of another worker, and make another hook. The error was: {self._failure}",
                code="GS_HOOK_BROKEN",
            ) from self._failure
        if self._pass is None:
            self._pass = BackwardPass(self._averages, self._threads)
            engine = torch.autograd.Variable._execution_engine
            # What is queued now runs before DistributedDataParallel takes averages from futures. What that queues runs
            # after it, and can raise an error without leaving DistributedDataParallel in the middle of a pass.
            engine.queue_callback(lambda: engine.queue_callback(self._end))
        return self._pass.add(bucket.buffer(), dict(zip(names, bucket.gradients(), strict=True)), self._used)

    def _check(self, buffer: torch.Tensor, names: Sequence[str]) -> None:
        if "" in names:
            raise InvalidArgumentError(
                "the model has a parameter that it had not, or that was frozen, when the hook was made; make the "
                "hook after the last change of the model",
                field="bucket",
            )
        if buffer.layout is not torch.strided:
            raise InvalidArgumentError(
                f"expected dense gradients, got a sparse one of parameter {names[0]!r}; make its embedding with "
                "sparse=False",
                field="bucket",
            )
        if buffer.device.type not in ("cpu", "cuda"):
            raise InvalidArgumentError(
                f"expected gradients on the CPU or on a CUDA device, got {buffer.device}", field="bucket"
            )

    def _end(self) -> None:
        """Raises the error of a backward pass that had one. Runs when the pass is over."""
        ended, self._pass = self._pass, None
        if ended is not None:
            self._failure = ended.failure()
        if self._failure is not None:
            raise self._failure
        self._used.clear()
        if ended is not None:
            averages = ended.used_by_others()
            for parameter, name in self._names.items():
                # DistributedDataParallel leaves parameters alone that no process of its own group has used.
                if name in averages:
                    parameter.grad = averages[name].view_as(parameter).clone()


def _note(used: set[str], name: str, _parameter: torch.Tensor) -> None:
    used.add(name)


def all_reduce_hook(
    client: Client,
    *,
    num_required: int,
    name: str,
    worker_id: str | None = None,
    step: int = 0,
    keep_averages: int = 4,
    timeout: float | None = None,
    container: str = "",
    refuse_non_finite: bool = True,
    durability: str | None = None,
    idle_lease: float | None = IDLE_SECONDS,
    if_exists: Literal["join", "error"] = "join",
) -> Callable[[torch.Tensor], None]:
    """Returns a hook for `FSDPModule.set_all_reduce_hook`, which averages the gradients of one module over replicas.

        for path, module in model.named_modules():
            if isinstance(module, FSDPModule):
                name = f"net/{path}/{shard}"
                module.set_all_reduce_hook(gradserve.torch.all_reduce_hook(client, num_required=2, name=name))

    Each replica shards the model over its own process group with `fully_shard`. Within a replica, FSDP2 reduces and
    scatters gradients; then the hook averages each shard with the same shard of the other replicas, in place. It waits
    for them, in the thread of the backward pass: modules are averaged one after the other, so their order must be the
    same in all replicas, as it is for equal models.

    Args:
        client: The client, which must stay open.
        num_required: The number of replicas that end a round: all, or fewer if some are backups.
        name: The name of the module's shard in the run: different for each module, and for each shard in a replica; the
            same in all replicas. Its accumulator lives until nobody has used it for a day.
        worker_id: The replica's id, different from that of every other one. None: that of
            GRADSERVE_WORKER_ID, or a new one.
        step: The number of steps of this run that the weights have behind them: 0 for a new run.
        keep_averages: The number of averages that the server keeps: a replica may be late by so many steps.
        timeout: Seconds to wait for other replicas; and for a server that is gone, unless GRADSERVE_RESTART_PATIENCE is
            set. None: the client's timeout. math.inf: no limit.
        container: The namespace of the name.
        refuse_non_finite: Whether gradients with infinities or NaN are refused, with an InvalidArgumentError that names
            the parameter. Otherwise they reach all workers, which a GradScaler needs: then all skip the step.
        durability: What the server keeps of the run on its disk, as in `Client.gradient_accumulator`. None: what the
            server was started with.
        idle_lease: Seconds after its last use by a worker at which the run is deleted: a day. None: never.
        if_exists: What to do if a run of this name is further than `step`. "join": log a warning, drop the gradients of
            this worker and get the averages of the run until it has caught up. "error": raise AlreadyExistsError.

    Raises:
        InvalidArgumentError: An argument is not valid.

    The hook raises, out of `backward()`:
        InvalidArgumentError: The gradients are not what such a hook gets, or their number has changed.
        AlreadyExistsError: Another replica has a shard of another size or dtype under this name; or see `if_exists`.
        StaleGradientError: This replica is more than `keep_averages` steps late.
        GradserveError: See `GradientAccumulator.push_pull`.
    """
    member = Membership(
        client,
        name,
        num_required,
        worker_id,
        step,
        keep_averages,
        timeout,
        if_exists,
        container=container,
        refuse_non_finite=refuse_non_finite,
        durability=durability,
        idle_lease=idle_lease,
    )
    return _AllReduceHook(member)


class _AllReduceHook:
    def __init__(self, member: Membership) -> None:
        self._member = member
        self._rounds: Rounds | None = None
        self._spec: DenseSpec | None = None

    def __call__(self, reduce_output: torch.Tensor) -> None:
        """Replaces the gradients of a shard, one after the other in a tensor, by their averages over the replicas."""
        rounds = self._rounds_for(reduce_output)
        # The current stream is the one that the hook is to run in: copies to and from a GPU are ordered by it.
        average = rounds.average({_ONLY: reduce_output})[_ONLY]
        reduce_output.copy_(tensor_of(average))

    def _rounds_for(self, gradients: Any) -> Rounds:
        if type(gradients) is not torch.Tensor or gradients.layout is not torch.strided:
            raise InvalidArgumentError(
                f"expected the output of a reduce-scatter, a plain dense tensor, got {type(gradients).__qualname__}; "
                "all_reduce_hook is for FSDPModule.set_all_reduce_hook",
                field="reduce_output",
            )
        spec = DenseSpec(gradients.dtype, tuple(gradients.shape))
        if self._rounds is None:
            self._rounds, self._spec = self._member.rounds(_ONLY, {_ONLY: spec}), spec
        if spec != self._spec:
            raise InvalidArgumentError(
                f"expected gradients like those before in {self._member.name!r}, {self._spec}, got {spec}: in this "
                "pass, some parameters have no gradient. module.set_reduce_scatter_unused_params(True) makes FSDP "
                "send zeros for them. A hook serves one module only",
                field="reduce_output",
            )
        return self._rounds
