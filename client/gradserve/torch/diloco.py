"""DiLoCo and LocalSGD for PyTorch: workers that train by themselves, and synchronize every so many steps."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self, TypeAlias, Unpack, get_args

import torch

from gradserve import optim, reductions
from gradserve.client import Client
from gradserve.torch.optimizers import check_schedule, steps_of, take_steps
from gradserve.torch.parameters import module_of, persistent_buffers, trained_parameters
from gradserve.torch.tensors import tensor_of
from gradserve.training.diloco import (
    NESTEROV,
    DilocoWorker,
    IfExists,
    OnFailure,
    Plan,
    RunOptions,
    Weight,
    begin_diloco,
    fragments_by_name,
    fragments_by_size,
)
from gradserve.workers import new_worker_id
from gradserve_protocol.argument import Argument

Fragments: TypeAlias = int | Sequence[Sequence[str]] | Sequence[torch.nn.Module]
Buffers: TypeAlias = Literal["local", "mean"]


class DiLoCo:
    """Lets a worker train by itself, and synchronizes the model with other workers every `sync_every` steps.

        with (
            gradserve.connect("server:50051") as client,
            gradserve.torch.DiLoCo(client, model, optimizer, sync_every=100, name="llm", num_required=4),
        ):
            train(model, optimizer)

    The server holds the model. At the start of the block, it is loaded into the worker's; the first worker's values are
    the beginning of a new run. After every `sync_every` calls of `optimizer.step()`, a worker pushes what has changed
    since, waits for the others, and goes on from the version that the outer optimizer has made of the mean. A worker
    that joins later, or is started again, begins with the newest version.

    If a synchronization fails, as the network or too many workers are gone, training goes on; see `on_failure`. An
    update that comes too late for its round is dropped, and the worker goes on from the newest version, unless
    `max_staleness` lets it count.
    """

    def __init__(
        self,
        client: Client,
        model: torch.nn.Module,
        inner_optimizer: Any,
        *,
        sync_every: int,
        outer_optimizer: optim.Optimizer = NESTEROV,
        name: str,
        num_required: int,
        fragments: Fragments | None = None,
        fragment_sync_delay: int = 0,
        fragment_update_alpha: float = 0.0,
        weight: Weight = "steps",
        buffers: Buffers = "local",
        on_failure: OnFailure = "continue",
        if_exists: IfExists = "join",
        scheduler: Any = None,
        worker_id: str | None = None,
        timeout: float | None = None,
        container: str = "",
        **options: Unpack[RunOptions],
    ) -> None:
        """Takes what the block needs; the server is asked when it begins.

        Args:
            client: The client, which must stay open.
            model: The model. Its parameters that require a gradient are synchronized. Wrappers by torch.compile and for
                data parallelism are looked into.
            inner_optimizer: The optimizer, whose steps count. Its state stays with the worker.
            sync_every: The number of steps between two synchronizations of a parameter. The same for all workers.
            outer_optimizer: The optimizer on the server, which takes the mean of the updates for a gradient. Only that
                of the worker which creates the run counts; others log a warning if theirs differs.
            name: The name of the run.
            num_required: The number of updates that end a round: the number of workers, or fewer if some may be slow.
            fragments: Parts of the model that are synchronized in turn, every `sync_every / n` steps one of them, so
                less is sent at once: their number n, by which whole parameters are divided by size; or a list of lists
                of names of parameters; or a list of modules. Each has its own rounds and state of the optimizer. None:
                the whole model at once.
            fragment_sync_delay: The steps between taking an update and loading the version that it led to, in which
                training goes on beside the transfer. Less than `sync_every`.
            fragment_update_alpha: The part of the local values that stays when a version is loaded, from 0 to 1.
            weight: The weight of an update in the mean: "steps", the number of its steps; "tokens", those that `count`
                was told; "equal", 1; or a function of both, tokens and steps.
            buffers: What becomes of buffers of floats and integers, such as running means: "local", they stay each
                worker's own; "mean", they become the weighted mean of the workers', and the maximum if they are
                integers. Buffers that are not persistent stay.
            on_failure: What happens when a synchronization fails: "continue", training goes on, and the work is in a
                later update; "reset", the worker goes back to the version that it loaded last.
            if_exists: What to do if the run has versions: "join" it, or raise an "error".
            scheduler: The learning rate scheduler of the inner optimizer, if it has one. A worker that joins at inner
                step n steps it n times, and later for steps of the run that it missed.
            worker_id: This worker's id, different from that of every other worker. None: a new one.
            timeout: The longest wait for other workers, in seconds. None: the client's timeout. math.inf: no limit.
            container: The namespace of the name.
            **options: Further arguments of `Client.parameters`: min_required, grace, deadline, max_staleness,
                deterministic, durability, and others.

        Raises:
            InvalidArgumentError: An argument is not valid, or no parameter requires a gradient.

        The start of the block raises:
            AlreadyExistsError: Another worker of the run has another model, other fragments or another sync_every; or
                see `if_exists`.
            GradserveError: The server cannot be reached, or refuses.

        `optimizer.step()` raises:
            InvalidArgumentError: Nothing was counted for weight="tokens", or a parameter is not finite.
            AbortedError: The run was deleted.
            GradserveError: See `Parameters.push_pull`. Not for DeadlineExceededError, UnavailableError and
                ResourceExhaustedError, after which training goes on: a warning is logged.
        """
        if not hasattr(inner_optimizer, "register_step_post_hook"):
            raise Argument("inner_optimizer").error("a torch.optim.Optimizer", inner_optimizer)
        if buffers not in get_args(Buffers):
            raise Argument("buffers").error("'local' or 'mean'", buffers)
        if not isinstance(outer_optimizer, optim.Optimizer):
            raise Argument("outer_optimizer").error("an optimizer of gradserve.optim", outer_optimizer)
        check_schedule(inner_optimizer, scheduler, "DiLoCo")
        parameters = trained_parameters(model)
        parts = _fragments(parameters, fragments)
        plan = Plan(sync_every, len(parts), fragment_sync_delay, fragment_update_alpha, weight, on_failure)
        begin = partial(
            begin_diloco,
            client,
            num_required=num_required,
            to_framework=tensor_of,
            worker_id=worker_id or new_worker_id(),
            timeout=timeout,
            container=container,
            if_exists=if_exists,
        )
        trained = _HostValues(parameters)
        values = [trained.local(names) for names in parts]
        self._begin = [
            _Part(trained, partial(begin, values, plan, name=name, outer_optimizer=outer_optimizer, **options))
        ]
        if buffers == "mean":
            alone = replace(plan, num_fragments=1, delay=0, alpha=0.0)
            for title, kept, reduction in _kinds_of_buffers(model):
                of_kind: Any = {**options, "reduction": reduction, "schedule": None, "clip_norm": None}
                values = [kept.local(kept.tensors)]
                named = partial(begin, values, alone, name=f"{name}/{title}", outer_optimizer=optim.SGD(1.0))
                self._begin.append(_Part(kept, partial(named, **of_kind)))
        self._optimizer = inner_optimizer
        self._scheduler = scheduler
        self._workers: list[tuple[_HostValues, DilocoWorker]] = []
        self._hook: Any = None

    @property
    def step(self) -> int:
        """The number of inner steps of the run behind the model: a worker that joins begins with that of the others."""
        return self._worker.step

    @property
    def version(self) -> int:
        """The step of the version that was loaded last; of several fragments, the least."""
        return self._worker.version

    @property
    def worker_id(self) -> str:
        """This worker's id."""
        return self._worker.worker_id

    @property
    def num_failed(self) -> int:
        """The number of synchronizations that have failed since the last one that did not."""
        return self._worker.num_failed

    def count(self, *, tokens: int) -> None:
        """Counts tokens of the present step, before `optimizer.step()`: the weight of the update if it goes by tokens.

        Args:
            tokens: Their number: at least 0.
        """
        for _, worker in self._workers:
            worker.count(tokens)

    def sync(self) -> None:
        """Synchronizes the whole model now, with what was done since the last synchronization.

        For the end of a training whose steps `sync_every` does not divide: all workers have to call it, as its rounds
        need as many updates as others.

        Raises:
            GradserveError: As `optimizer.step()`.
        """
        for tensors, worker in self._workers:
            tensors.replace(worker.synchronize(tensors.local))

    def __enter__(self) -> Self:
        try:
            for part in self._begin:
                worker = part.begin()
                self._workers.append((part.tensors, worker))
                part.tensors.replace(worker.values())
            take_steps(self._scheduler, self.step - steps_of(self._scheduler))
            self._hook = self._optimizer.register_step_post_hook(self._after_step)
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._hook.remove()
        try:
            if error is None:
                for tensors, worker in self._workers:
                    tensors.replace(worker.finish(tensors.local))
        finally:
            self._close()

    @property
    def _worker(self) -> DilocoWorker:
        if not self._workers:
            raise RuntimeError("DiLoCo has not begun: use it as a context manager")
        return self._workers[0][1]

    def _after_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if torch.compiler.is_compiling():
            torch.compiler.disable(self._after_step)(optimizer, args, kwargs)
            return
        expected = self.step + 1
        for tensors, worker in self._workers:
            tensors.replace(worker.take_step(tensors.local))
        take_steps(self._scheduler, self.step - expected)  # of rounds that this worker has missed

    def _close(self) -> None:
        for _, worker in self._workers:
            worker.close()


class LocalSGD(DiLoCo):
    """Averages the models of workers every `sync_every` steps: DiLoCo whose outer optimizer only takes the mean.

    with gradserve.torch.LocalSGD(client, model, optimizer, sync_every=100, name="net", num_required=4):
        train(model, optimizer)
    """

    def __init__(
        self,
        client: Client,
        model: torch.nn.Module,
        optimizer: Any,
        *,
        sync_every: int,
        name: str,
        num_required: int,
        weight: Weight = "steps",
        buffers: Buffers = "local",
        on_failure: OnFailure = "continue",
        if_exists: IfExists = "join",
        scheduler: Any = None,
        worker_id: str | None = None,
        timeout: float | None = None,
        container: str = "",
        **options: Unpack[RunOptions],
    ) -> None:
        """Takes what the block needs; see `DiLoCo` about arguments and errors."""
        super().__init__(
            client,
            model,
            optimizer,
            sync_every=sync_every,
            outer_optimizer=optim.SGD(1.0),
            name=name,
            num_required=num_required,
            weight=weight,
            buffers=buffers,
            on_failure=on_failure,
            if_exists=if_exists,
            scheduler=scheduler,
            worker_id=worker_id,
            timeout=timeout,
            container=container,
            **options,
        )


class _HostValues:
    """Tensors of a model whose values travel, and come back.

    Attributes:
        tensors: The tensors, by name.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None = None) -> None:
        """Takes the tensors, and the dtype in which they travel: None for their own."""
        self.tensors = tensors
        self._dtype = dtype
        self._pinned: dict[str, torch.Tensor] = {}

    def local(self, names: Collection[str]) -> dict[str, torch.Tensor]:
        """Returns the present values in the memory of the host, where they stay until the next step or call."""
        found, devices = {}, set()
        for name in names:
            tensor = self.tensors[name].detach()
            if tensor.device.type != "cpu":
                devices.add(tensor.device)
                tensor = self._copy(name, tensor)
            found[name] = tensor if self._dtype is None else tensor.to(self._dtype)
        for device in devices:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
        return found

    def replace(self, values: Mapping[str, torch.Tensor]) -> None:
        """Replaces the values of some of the tensors, in place: optimizers keep their state."""
        with torch.no_grad():
            for name, value in values.items():
                tensor = self.tensors[name]
                tensor.copy_(value if tensor.dtype.is_floating_point else value.round())

    def _copy(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        pinned = self._pinned.get(name)
        if pinned is None:
            is_cuda = tensor.device.type == "cuda"
            pinned = self._pinned[name] = torch.empty_like(tensor, device="cpu", pin_memory=is_cuda)
        return pinned.copy_(tensor, non_blocking=True)


@dataclass(frozen=True)
class _Part:
    """Tensors that are synchronized by the same rules, and the call that finds them on the server."""

    tensors: _HostValues
    begin: Callable[[], DilocoWorker]


def _fragments(parameters: Mapping[str, torch.Tensor], fragments: Any) -> list[list[str]]:
    """Returns the names of the parameters in each fragment.

    Raises:
        InvalidArgumentError: Fragments are neither a number nor lists of names nor modules, or do not have each
            parameter once.
    """
    if fragments is None:
        return [list(parameters)]
    if isinstance(fragments, int):
        return fragments_by_size({name: each.numel() * each.itemsize for name, each in parameters.items()}, fragments)
    if isinstance(fragments, Sequence) and all(isinstance(each, torch.nn.Module) for each in fragments):
        within = [{id(each) for each in module.parameters()} for module in fragments]
        fragments = [[name for name, each in parameters.items() if id(each) in ids] for ids in within]
    return fragments_by_name(parameters, fragments)


def _kinds_of_buffers(model: torch.nn.Module) -> list[tuple[str, _HostValues, reductions.Reduction | str]]:
    """Returns the buffers that are reduced in one way: its title, the tensors, and the reduction."""
    kept = persistent_buffers(module_of(model))
    floats = {name: each for name, each in kept.items() if each.dtype.is_floating_point}
    counters = {
        name: each
        for name, each in kept.items()
        if not each.dtype.is_floating_point and not each.dtype.is_complex and each.dtype is not torch.bool
    }
    kinds: list[tuple[str, _HostValues, reductions.Reduction | str]] = []
    if floats:
        kinds.append(("buffers", _HostValues(floats), "mean"))
    if counters:
        kinds.append(("counters", _HostValues(counters, torch.float64), "maximum"))
    return kinds
