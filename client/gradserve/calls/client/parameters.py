"""The client's calls about parameters that the server holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal

from gradserve import optim, reductions
from gradserve.calls.client.state import ClientState
from gradserve.calls.exchange import Operation, tracked
from gradserve.calls.parameters.model import model_of
from gradserve.calls.parameters.operations import ParametersCalls
from gradserve.calls.parameters.spec import ParametersOptions
from gradserve.conversion.plain import as_flag, as_text
from gradserve.conversion.trees import Tree
from gradserve.parameter_records import ParametersInfo, RoundRules
from gradserve_protocol.argument import Argument


class ParametersOfClient(ClientState):
    """Finds, creates, lists and deletes parameters."""

    def parameters(
        self,
        values: Tree | None = None,
        shared_name: str | None = None,
        name: str = "parameters",
        *,
        container: str = "",
        optimizer: optim.Optimizer | None = None,
        update: str = "delta",
        num_required: int = 1,
        min_required: int | None = None,
        expected: int | Literal["alive"] | None = None,
        grace: float | Literal["adaptive"] = 0.0,
        max_grace: float = 60.0,
        min_interval: float = 0.0,
        deadline: float | None = None,
        max_staleness: int = 0,
        staleness: str = "constant",
        normalize: str = "weights",
        reduction: reductions.Reduction | str = "mean",
        clip_norm: float | None = None,
        schedule: optim.Schedule | None = None,
        keep_versions: int = 2,
        keep_rounds: int = 1000,
        deterministic: bool = False,
        refuse_non_finite: bool = True,
        one_per_worker: bool = True,
        idle_lease: float | None = None,
        durability: str | None = None,
        agreement: Mapping[str, str] | None = None,
        sharded: bool = False,
        progress: Callable[[int, int], object] | bool | None = None,
    ) -> Operation[ParametersCalls]:
        """Finds the parameters with this shared name, or creates them with these values; without values, finds them.

        The server holds the parameters in versions. Workers push updates, an optimizer on the server applies the
        reduced updates of a round, and that is the next version; its step is greater by one. Only the creator's values
        count: a worker that is started again cannot reset a run. Values are not even sent to parameters that exist.

        The optimizer, its schedule and the rules for the end of a round (num_required, min_required, expected, grace,
        max_grace, min_interval, deadline) may differ from those of existing parameters, which stay as they are:
        `Parameters.change` changes them. All other properties must be the same.

        Without values, `client.parameters(shared_name="llm")` finds parameters that another client has created, and
        takes components, optimizer, rules and all other properties from the server. It does not wait for the creator:
        catch NotFoundError, sleep for a second and call it again, until the creator is there.

        A round ends when `num_required` updates are in, and then `grace` has passed for latecomers, or all that are
        `expected` have come; but not before `min_interval` after the end of the last one. Or it ends `deadline` after
        its first update, if at least `min_required` are in; otherwise, calls that wait end with an error that names the
        missing workers, and the updates stay.

        Args:
            values: The initial values: a dict of arrays by name, a tree of dicts, lists, tuples and named tuples, like
                JAX's pytrees, or a state_dict of PyTorch without buffers. The arrays are of any library, and of
                float16, bfloat16, float32 or float64. Or shapes alone, of parameters that exist: DenseSpec,
                jax.ShapeDtypeStruct, tensors on PyTorch's device "meta". Or what `load_parameters` has read: a saved
                run, which goes on from its step, with its optimizer and schedule if none is given here. Or a Version of
                parameters that a server has lost: they go on from its step, without the optimizer's state. A tensor of
                PyTorch with several names (tied parameters) is one component under the first name: it travels once,
                and updates may have it under any of them. None: parameters that exist, as a dict by component name in
                the creator's order; only shared_name, container and progress may be given with it.
            shared_name: The name by which other clients find the parameters, which then live until they are deleted.
                None: they are private and deleted with this client: on `close`, or if the client dies or its network
                fails, after `client_lease` of `server_info().limits`, 60 seconds by default.
            name: The prefix of the name of private parameters in lists.
            container: The namespace of the shared name. Empty: the default one.
            optimizer: The optimizer, of `gradserve.optim`. None: SGD with a learning rate of 1, which makes the mean of
                the workers' parameters the next version; only for update="delta".
            update: What workers push: "delta", their parameters minus the version from which they started, or
                "gradient", the gradient of the loss.
            num_required: The number of updates that end a round.
            min_required: The number of updates that end a round at its deadline. None: num_required.
            expected: The number of updates after which nobody else is waited for; or "alive": an update of each worker
                that has pushed in one of the last two rounds and whose client still runs. None: nobody in particular.
            grace: Seconds in which latecomers count after num_required updates; or "adaptive": from the durations of
                earlier rounds.
            max_grace: The longest adaptive grace, in seconds, and that of the first round.
            min_interval: The shortest time between the ends of two rounds, in seconds.
            deadline: Seconds after the first update of a round at which it ends with min_required updates. None: never.
            max_staleness: The staleness up to which updates count: the number of versions made since the one from which
                an update was computed.
            staleness: The factor of the weight of an update of staleness s: "constant", 1; "inverse_sqrt",
                1 / sqrt(1 + s); "polynomial(A)", (1 + s)^-A; "exponential(G)", G^s.
            normalize: The divisor of a mean: "weights", the sum of the weights of the updates that have the component;
                "count", their number, as in FedBuff.
            reduction: How the updates of a round become one: "mean", "sum", "median", or of `gradserve.reductions`.
            clip_norm: The L2 norm over all components to which longer updates are scaled. None: none.
            schedule: The schedule of the learning rate, of `gradserve.optim`. None: constant.
            keep_versions: The number of versions that can be read, the newest included.
            keep_rounds: The number of rounds whose records are kept; fewer if the server has no room for them.
            deterministic: Whether to sum in the order of worker ids, so that the same updates give the same bits in
                whatever order they arrive.
            refuse_non_finite: Whether to refuse updates with infinities or NaN, with an InvalidArgumentError that
                locates the first one.
            one_per_worker: Whether to count only the first update of each worker in a round.
            idle_lease: Seconds without use after which the server deletes the parameters. None: never. Calls on them by
                any client count as use, even while they wait; listing does not.
            durability: What survives a crash of a server with a state directory: "none"; "round": each version with the
                state of its optimizer, from before anybody sees it; "gradient": each update, from before its call
                returns. None: what the server was started with.
            agreement: Short texts by name on which all who create or find the parameters must agree: at most 64 of at
                most 1024 bytes. The server compares them, and does nothing else with them. None: none.
            sharded: Whether to spread the parameters over all servers of a client that has several, or whose aggregator
                has several upstream, by bytes, which divides transfers, memory and the optimizer's work among them.
                False: they are on one.
            progress: Told how far the transfer of the values is, if they are sent, as by `Client.put`.

        Returns:
            The parameters.

        Raises:
            InvalidArgumentError: An argument is not valid, or arguments do not go together.
            NotFoundError: There are no parameters of this name, and no values were given to create them; or they are
                private to another client.
            AlreadyExistsError: The name is taken by parameters with other components or properties; the message says
                which.
            ResourceExhaustedError: The server has reached its limit of parameters, or has too little memory.
        """
        options = ParametersOptions(
            optimizer=optimizer,
            update=update,
            rules=RoundRules(num_required, min_required, expected, grace, max_grace, min_interval, deadline),
            max_staleness=max_staleness,
            staleness=staleness,
            normalize=normalize,
            reduction=reduction,
            clip_norm=clip_norm,
            schedule=schedule,
            keep_versions=keep_versions,
            keep_rounds=keep_rounds,
            deterministic=deterministic,
            refuse_non_finite=refuse_non_finite,
            one_per_worker=one_per_worker,
            durability=durability,
            agreement=agreement,
            sharded=as_flag(sharded, Argument("sharded")),
        )
        if values is None:
            found = partial(self._parameters.find, options, shared_name, container=container, idle_lease=idle_lease)
            wire = yield from tracked(progress, found)
            return ParametersCalls(wire, self._parameters, self._timeout)
        opened = partial(
            self._parameters.open,
            model_of(values),
            options,
            name=name,
            shared_name=shared_name,
            container=container,
            idle_lease=idle_lease,
        )
        wire = yield from tracked(progress, opened)
        return ParametersCalls(wire, self._parameters, self._timeout)

    def list_parameters(self, container: str = "") -> Operation[list[ParametersInfo]]:
        """Describes all parameters of a container, sorted by name.

        Args:
            container: The namespace. Empty: the default one.

        Returns:
            The descriptions. Each is a snapshot.
        """
        return self._parameters.list_all(container)

    def delete_parameters(self, name: str, container: str = "") -> Operation[bool]:
        """Deletes parameters by their name, for all clients. Calls that wait on them end with AbortedError.

        Args:
            name: The shared name, or the name in `list_parameters`.
            container: The namespace of the name. Empty: the default one.

        Returns:
            Whether they existed.
        """
        return self._parameters.delete(as_text(container, Argument("container")), as_text(name, Argument("name")))
