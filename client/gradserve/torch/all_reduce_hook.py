"""A hook for FSDP2, which averages shards over replicas."""

from collections.abc import Callable
from typing import Any, Literal

import torch

from gradserve.client import Client
from gradserve.errors import InvalidArgumentError
from gradserve.results import DenseSpec
from gradserve.torch.rounds import IDLE_SECONDS, Membership, Rounds
from gradserve.torch.tensors import tensor_of

_ONLY = "gradients"


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
        worker_id: The replica's id, different from that of every other one. None: a new one.
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
