"""A server that holds a model and takes the optimizer's steps: workers send gradients."""

import logging
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self, Unpack

import torch

from gradserve import optim
from gradserve.client import Client
from gradserve.conversion.plain import as_flag
from gradserve.parameter_records import Version
from gradserve.parameters import Parameters
from gradserve.results import Outcome
from gradserve.torch.optimizers import Arguments, has_schedule, unwrapped, with_own_gradients
from gradserve.torch.parameters import Gradients, load_version, parameters_of, trained_parameters
from gradserve.training.diloco.plan import RunOptions
from gradserve.workers import new_worker_id
from gradserve_protocol.argument import Argument
from gradserve_protocol.errors import InvalidArgumentError

_log = logging.getLogger(__name__)


class ParameterServer:
    """Lets the server take the steps of an optimizer, with the gradients of all workers, until the end of the block.

        with (
            gradserve.connect("server:50051") as client,
            gradserve.torch.ParameterServer(client, model, optimizer, name="net", num_required=4),
        ):
            train(model, optimizer)

    At the start of the block, the model gets the server's newest version; the first worker's values are the beginning
    of a new run. Each `optimizer.step()` then sends the gradients, and loads the version that the server has made of
    them: the optimizer itself takes no step, and its state is on the server. So workers that join or come back need
    nothing else, and all have equal weights.

    Attributes:
        weight: The weight of the next gradients in the mean: the size of the batch, where batches differ.
    """

    def __init__(
        self,
        client: Client,
        model: torch.nn.Module,
        optimizer: Any,
        *,
        name: str,
        num_required: int,
        asynchronous: bool = False,
        worker_id: str | None = None,
        timeout: float | None = None,
        container: str = "",
        **options: Unpack[RunOptions],
    ) -> None:
        """Takes what the block needs; the server is asked when it begins.

        Args:
            client: The client, which must stay open.
            model: The model. Its parameters that require a gradient are on the server; buffers stay with the worker.
            optimizer: The optimizer of PyTorch that the program steps, as `average_gradients` takes it: SGD, Adam,
                AdamW or Adagrad with one group of parameters, as `gradserve.optim.from_torch` translates it. Only that
                of the worker which creates the run counts. Its learning rate follows `schedule`, of `gradserve.optim`,
                rather than a scheduler.
            name: The name of the run.
            num_required: The number of gradients that make a step: the number of workers, or fewer.
            asynchronous: Whether a step waits for nobody: it sends its gradients, and loads the newest version.
                Gradients of older versions count if `max_staleness` allows it, by `staleness`.
            worker_id: This worker's id, different from that of every other worker. None: that of
                GRADSERVE_WORKER_ID, or a new one.
            timeout: The longest wait for other workers, in seconds. None: the client's timeout. math.inf: no limit.
            container: The namespace of the name.
            **options: Further arguments of `Client.parameters`: max_staleness, staleness, schedule, grace, deadline,
                clip_norm, durability, and others.

        Raises:
            InvalidArgumentError: The optimizer cannot be translated, has a scheduler, or an argument is not valid.

        The start of the block raises:
            AlreadyExistsError: Another worker of the run has another model or other properties.
            GradserveError: The server cannot be reached, or refuses.

        `optimizer.step()` raises:
            InvalidArgumentError: A gradient is sparse, infinite or NaN, or there is none; an argument is not a closure;
                or a GradScaler has left unscaling to the optimizer.
            DeadlineExceededError: Too few workers sent their gradients in time; the message says which are missing.
            GradserveError: See `Parameters.push_pull`.
        """
        stepped, optimizer = optimizer, unwrapped(optimizer)
        if has_schedule(stepped):
            raise InvalidArgumentError(
                "the optimizer has a learning rate scheduler, but its steps are taken on the server: pass "
                "schedule=gradserve.optim.cosine(...) or another one there instead",
                field="optimizer",
            )
        trained = trained_parameters(model)
        if {id(each) for group in optimizer.param_groups for each in group["params"]} != set(map(id, trained.values())):
            raise InvalidArgumentError(
                "expected an optimizer of the model's parameters that require a gradient, all of them and no others",
                field="optimizer",
            )
        self._parameters_options: dict[str, Any] = {
            "shared_name": name,
            "container": container,
            "optimizer": optim.from_torch(optimizer),
            "update": "gradient",
            "num_required": num_required,
            **options,
        }
        self._client = client
        self._model = model
        self._optimizer = optimizer
        self._gradients = Gradients(trained, zeros_for_missing=True)
        self._waits = not as_flag(asynchronous, Argument("asynchronous"))
        self._timeout = timeout
        self.worker_id = worker_id or new_worker_id()
        """This worker's id."""
        self.weight = 1.0
        self._parameters: Parameters | None = None
        self._version: Version | None = None
        self._hook: Any = None

    @property
    def step(self) -> int:
        """The step of the version in the model: the number of steps that the server has taken until it."""
        return self._begun()[1].step

    def __enter__(self) -> Self:
        self._parameters = self._client.parameters(parameters_of(self._model), **self._parameters_options)
        self._load(self._parameters.read(copy=False))
        self._hook = self._optimizer.register_step_pre_hook(self._before_step)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._hook.remove()

    def _before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments | None:
        """Exchanges gradients for a version; leaves none, so that the step itself changes nothing."""
        if torch.compiler.is_compiling():
            late: Arguments | None = torch.compiler.disable(self._before_step)(optimizer, args, kwargs)
            return late
        replaced = with_own_gradients(optimizer, args, kwargs)
        parameters, version = self._begun()
        gradients = self._gradients.to_send()
        if self._waits:
            pulled = parameters.push_pull(
                gradients, version, weight=self.weight, worker_id=self.worker_id, timeout=self._timeout, copy=False
            )
            outcome, version = pulled.outcome, pulled.version
        else:
            outcome = parameters.push(gradients, version, weight=self.weight, worker_id=self.worker_id).outcome
            version = parameters.read(copy=False)
        if outcome is not Outcome.ACCEPTED:
            _log.info("gradients from step %d were dropped: %s", self.step, outcome.name)
        self._load(version)
        self._gradients.drop()
        return replaced

    def _load(self, version: Version) -> None:
        load_version(self._model, version)
        self._version = version

    def _begun(self) -> tuple[Parameters, Version]:
        if self._parameters is None or self._version is None:
            raise RuntimeError("ParameterServer has not begun: use it as a context manager")
        return self._parameters, self._version
