"""DiLoCo and LocalSGD for PyTorch: workers that train by themselves, and synchronize every so many steps."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self, TypeAlias, Unpack, get_args

import torch

from gradserve import codecs, optim, reductions
from gradserve.client import Client
from gradserve.conversion.plain import as_integer
from gradserve.data import Batches
from gradserve.torch.optimizers import check_schedule, steps_of, take_steps, unwrapped, unwrapped_scheduler
from gradserve.torch.parameters import module_of, persistent_buffers, trained_parameters
from gradserve.torch.replica import HostValues, ranks_of
from gradserve.torch.tensors import tensor_of
from gradserve.training.diloco.plan import OnFailure, Plan, RunOptions, Weight, fragments_of
from gradserve.training.diloco.worker import NESTEROV, DilocoWorker, IfExists, begin_diloco
from gradserve.workers import new_worker_id
from gradserve_protocol.argument import Argument
from gradserve_protocol.errors import GradserveError, InvalidArgumentError

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
        codec: codecs.Codec | str | None = None,
        codec_down: codecs.Codec | str | None = None,
        buffers: Buffers = "local",
        on_failure: OnFailure | None = None,
        if_exists: IfExists = "join",
        scheduler: Any = None,
        worker_id: str | None = None,
        timeout: float | None = None,
        container: str = "",
        process_group: Any = None,
        data: Batches[Any] | None = None,
        **options: Unpack[RunOptions],
    ) -> None:
        """Takes what the block needs; the server is asked when it begins.

        Args:
            client: The client, which must stay open.
            model: The model. Its parameters that require a gradient are synchronized. Wrappers by torch.compile and for
                data parallelism are looked into.
            inner_optimizer: The optimizer, whose steps count. Its state stays with the worker. Wrappers by Accelerate
                and Lightning are looked into, also those of the scheduler.
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
            codec: How updates travel, of `gradserve.codecs` or its name, such as "int4": with fewer bytes and some
                error, which comes with the next updates. None: as they are.
            codec_down: How versions travel: "bf16" or "int8" are good beginnings. None: as they are.
            buffers: What becomes of buffers of floats and integers, such as running means: "local", they stay each
                worker's own; "mean", they become the weighted mean of the workers', and the maximum if they are
                integers. Buffers that are not persistent stay.
            on_failure: What happens when a synchronization fails: "continue", training goes on, and the work is in a
                later update; "reset", the worker goes back to the version that it loaded last. None: "continue", with
                `data` "reset".
            if_exists: What to do if the run has versions: "join" it, or raise an "error".
            scheduler: The learning rate scheduler of the inner optimizer, if it has one. A worker that joins at inner
                step n steps it n times, and later for steps of the run that it missed.
            worker_id: This worker's id, different from that of every other worker. None: that of
                GRADSERVE_WORKER_ID, or a new one.
            timeout: The longest wait for other workers, in seconds. None: the client's timeout. math.inf: no limit.
            container: The namespace of the name.
            process_group: The ranks that train this model together and are one worker: all of them run the block with
                the same arguments, and the first one talks to the server for all. None: those of a
                DistributedDataParallel, or of the mesh over which FSDP2 has sharded the parameters.
            data: The batches of this worker, made by `gradserve.data`, if the run shares them out: each sample is in
                one update that counts, once per epoch. Its batches_per_step is `sync_every`, or a multiple of it if
                gradients are accumulated. The same for all. Not with several fragments, delay or mixing, max_staleness
                or several ranks.
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
        stepped, inner_optimizer = inner_optimizer, unwrapped(inner_optimizer, "inner_optimizer")
        scheduler = unwrapped_scheduler(scheduler)
        if buffers not in get_args(Buffers):
            raise Argument("buffers").error("'local' or 'mean'", buffers)
        if not isinstance(outer_optimizer, optim.Optimizer):
            raise Argument("outer_optimizer").error("an optimizer of gradserve.optim", outer_optimizer)
        check_schedule(stepped, scheduler, "DiLoCo")
        parameters = trained_parameters(model, may_be_sharded=True)
        parts = _fragments(parameters, fragments)
        plan = Plan(
            sync_every,
            len(parts),
            fragment_sync_delay,
            fragment_update_alpha,
            weight,
            on_failure,
            codec,
            codec_down,
            data,
        )
        self._ranks = ranks_of(model, parameters, process_group)
        if data is not None and self._ranks is not None:
            raise InvalidArgumentError(
                "expected no data for a model on several ranks, got some: each rank would take the same samples",
                field="data",
            )
        make_values = HostValues if self._ranks is None else self._ranks.values
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
        of_model = partial(begin, plan=plan, name=name, outer_optimizer=outer_optimizer, **options)
        self._parts = [_Part(make_values(parameters), parts, of_model)]
        if buffers == "mean":
            alone = replace(plan, num_fragments=1, delay=0, alpha=0.0, codec=None, codec_down=None, data=None)
            for title, kept, dtype, reduction in _kinds_of_buffers(model):
                of_kind: Any = {**options, "reduction": reduction, "schedule": None, "clip_norm": None}
                named = partial(begin, plan=alone, name=f"{name}/{title}", outer_optimizer=optim.SGD(1.0), **of_kind)
                self._parts.append(_Part(make_values(kept, dtype), [list(kept)], named))
        self._plan = plan
        self._optimizer = inner_optimizer
        self._scheduler = scheduler
        self._workers: list[DilocoWorker] = []
        """The workers of the parts; none on ranks that do not lead."""
        self._status: _Status | None = None
        self._num_taken = 0
        self._tokens = 0
        self._hook: Any = None

    @property
    def step(self) -> int:
        """The number of inner steps of the run behind the model: a worker that joins begins with that of the others."""
        return self._begun.step

    @property
    def version(self) -> int:
        """The step of the version that was loaded last; of several fragments, the least."""
        return self._begun.version

    @property
    def worker_id(self) -> str:
        """This worker's id."""
        return self._begun.worker_id

    @property
    def num_failed(self) -> int:
        """The number of synchronizations that have failed since the last one that did not."""
        return self._begun.num_failed

    def count(self, *, tokens: int) -> None:
        """Counts tokens of the present step, before `optimizer.step()`: the weight of the update if it goes by tokens.

        Args:
            tokens: Their number: at least 0. Of several ranks, those of this one.
        """
        self._tokens += as_integer(tokens, Argument("tokens"), range(1 << 62))

    def report(self, **metrics: float) -> None:
        """Notes what was measured in the present step, before `optimizer.step()`: `report(loss=loss.item())`.

        The next update has the means since the one before it, the rounds have the means of all workers, and the status
        page and Prometheus show those; see `Parameters.push`. Of several ranks, those of the first one count.
        """
        for worker in self._workers[:1]:
            worker.report(metrics)

    def sync(self) -> None:
        """Synchronizes the whole model now, with what was done since the last synchronization.

        For the end of a training whose steps `sync_every` does not divide: all workers have to call it, as its rounds
        need as many updates as others.

        Raises:
            GradserveError: As `optimizer.step()`.
        """
        try:
            self._exchange(lambda worker, tensors: worker.synchronize(tensors.local))
        finally:
            self._num_taken = 0
            for worker in self._workers:  # also of parts that an exception has kept from `synchronize`
                worker.restart_turns()

    def __enter__(self) -> Self:
        try:
            self._lead(self._enter)
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
            if error is None and self._plan.delay:
                self._exchange(lambda worker, tensors: worker.finish(tensors.local))
        finally:
            self._close()

    @property
    def _begun(self) -> "_Status":
        if self._status is None:
            raise RuntimeError("DiLoCo has not begun: use it as a context manager")
        return self._status

    def _enter(self) -> None:
        for part in self._parts:
            worker = part.begin([part.tensors.local(names) for names in part.fragments])
            self._workers.append(worker)
            part.tensors.replace(worker.values())

    def _after_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if torch.compiler.is_compiling():
            torch.compiler.disable(self._after_step)(optimizer, args, kwargs)
            return
        expected = self.step + 1
        self._num_taken += 1
        for worker in self._workers:
            worker.count_step()
        if self._plan.is_due(self._num_taken):
            self._exchange(lambda worker, tensors: worker.synchronize_due(tensors.local))
            take_steps(self._scheduler, self.step - expected)  # of rounds that this worker has missed
        else:
            self._status = self._begun._replace(step=expected)

    def _exchange(self, call: Callable[[DilocoWorker, HostValues], Mapping[str, torch.Tensor]]) -> None:
        """Makes a call of all parts that may synchronize them, even if one fails; takes over what it returns."""
        tokens, self._tokens = self._tokens, 0
        if self._ranks is not None:
            tokens = self._ranks.sum(tokens)

        def exchange() -> None:
            errors = list[GradserveError]()
            for worker in self._workers:
                worker.count(tokens)
            for worker, part in zip(self._workers, self._parts, strict=True):
                try:
                    part.tensors.replace(call(worker, part.tensors))
                except GradserveError as error:
                    errors.append(error)
            if errors:
                raise errors[0]

        self._lead(exchange)

    def _lead(self, work: Callable[[], object]) -> None:
        """Does some work with the server, or this rank's part of it; notes how far the run is then."""

        def worked() -> _Status:
            work()
            worker = self._workers[0]
            return _Status(worker.step, worker.version, worker.worker_id, worker.num_failed)

        self._status = worked() if self._ranks is None else self._ranks.led(worked)

    def _close(self) -> None:
        for worker in self._workers:
            worker.close()


class _Status(NamedTuple):
    """The state of a run, as all ranks of a worker know it; see the properties of `DiLoCo`."""

    step: int
    version: int
    worker_id: str
    num_failed: int


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
        codec: codecs.Codec | str | None = None,
        codec_down: codecs.Codec | str | None = None,
        buffers: Buffers = "local",
        on_failure: OnFailure | None = None,
        if_exists: IfExists = "join",
        scheduler: Any = None,
        worker_id: str | None = None,
        timeout: float | None = None,
        container: str = "",
        process_group: Any = None,
        data: Batches[Any] | None = None,
        **options: Unpack[RunOptions],
    ) -> None:
        """Arguments and errors are those of `DiLoCo`."""
        super().__init__(
            client,
            model,
            optimizer,
            sync_every=sync_every,
            outer_optimizer=optim.SGD(1.0),
            name=name,
            num_required=num_required,
            weight=weight,
            codec=codec,
            codec_down=codec_down,
            buffers=buffers,
            on_failure=on_failure,
            if_exists=if_exists,
            scheduler=scheduler,
            worker_id=worker_id,
            timeout=timeout,
            container=container,
            process_group=process_group,
            data=data,
            **options,
        )


@dataclass(frozen=True)
class _Part:
    """Tensors that are synchronized by the same rules.

    Attributes:
        tensors: The tensors.
        fragments: Their names in each fragment.
        begin: Finds or creates the parameters of fragments with initial values.
    """

    tensors: HostValues
    fragments: Sequence[Sequence[str]]
    begin: Callable[[Sequence[Mapping[str, torch.Tensor]]], DilocoWorker]


def _fragments(parameters: Mapping[str, torch.Tensor], fragments: Any) -> list[list[str]]:
    """Returns the names of the parameters in each fragment.

    Raises:
        InvalidArgumentError: Fragments are neither a number nor lists of names nor modules, or do not have each
            parameter once.
    """
    if isinstance(fragments, Sequence) and all(isinstance(each, torch.nn.Module) for each in fragments):
        within = [{id(each) for each in module.parameters()} for module in fragments]
        fragments = [[name for name, each in parameters.items() if id(each) in ids] for ids in within]
    return fragments_of({name: each.numel() * each.itemsize for name, each in parameters.items()}, fragments)


def _kinds_of_buffers(
    model: torch.nn.Module,
) -> Iterator[tuple[str, dict[str, torch.Tensor], torch.dtype | None, reductions.Reduction | str]]:
    """Yields the buffers that are reduced in one way: its title, the tensors, their dtype on the way, the reduction."""
    kept = persistent_buffers(module_of(model))
    floats = {name: each for name, each in kept.items() if each.dtype.is_floating_point}
    others = {name: each for name, each in kept.items() if not each.dtype.is_floating_point}
    counters = {
        name: each for name, each in others.items() if not each.dtype.is_complex and each.dtype is not torch.bool
    }
    if floats:
        yield "buffers", floats, None, "mean"
    if counters:
        yield "counters", counters, torch.float64, "maximum"
