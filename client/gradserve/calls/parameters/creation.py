"""Finds parameters, or creates them; lists and deletes them by name."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

from google.protobuf.message import Message

from gradserve.calls.accumulators.components import arrays_of
from gradserve.calls.accumulators.kept import KeptMemory
from gradserve.calls.accumulators.session import RoundSession, Watch
from gradserve.calls.combinators import at_target, together
from gradserve.calls.exchange import Operation, Progress, Reply, Unary, Whole
from gradserve.calls.identity import RequestIds, private_name
from gradserve.calls.parameters.fields import fields_named
from gradserve.calls.parameters.model import Model, ParameterComponents, model_of
from gradserve.calls.parameters.spec import ParametersOptions, given_names, info_of, shapes_of, spec_of
from gradserve.calls.parameters.wire import PARAMETERS, ParametersWire, add_saved
from gradserve.calls.private_resources import PrivateResources
from gradserve.calls.server import Cluster
from gradserve.calls.tensors import call_with_arrays
from gradserve.conversion.plain import as_text
from gradserve.optim.messages import optimizer_of, schedule_of
from gradserve.parameter_records import ParametersInfo
from gradserve_protocol.argument import Argument
from gradserve_protocol.errors import InvalidArgumentError, NotFoundError
from gradserve_protocol.placement import DEFAULT_CONTAINER
from gradserve_protocol.v1 import parameters_messages_pb2 as messages_pb2
from gradserve_protocol.v1 import parameters_pb2, tensor_pb2

_CREATE = "CreateParameters"


class ParametersCache:
    """Opens a client's parameters, each on its home among the servers. Safe to use from several threads."""

    def __init__(
        self,
        ids: RequestIds,
        cluster: Cluster,
        private: Sequence[PrivateResources],
        memory: KeptMemory,
        watches: Sequence[Watch],
    ) -> None:
        """Takes the state of the client.

        Args:
            ids: Its request ids.
            cluster: Its servers.
            private: Its private resources on each of them.
            memory: The memory of the contributions that it keeps.
            watches: The watch over these, for each server.
        """
        self._ids = ids
        self._cluster = cluster
        self._private = private
        self._memory = memory
        self._watches = watches

    def open(
        self,
        model: Model,
        options: ParametersOptions,
        progress: Progress | None = None,
        *,
        name: str,
        shared_name: str | None,
        container: str,
        idle_lease: float | None,
    ) -> Operation[ParametersWire]:
        """Finds the parameters with a shared name, or creates them.

        Args:
            model: Their components and values.
            options: Their properties.
            progress: Told how many bytes of the values were moved.
            name: The prefix of the name of parameters without a shared name.
            shared_name: The name by which others find them; None for some that only this client uses.
            container: The namespace of the name.
            idle_lease: Seconds without use after which they are deleted; None: never.
        """
        name = as_text(name, Argument("name"))
        is_private = shared_name is None
        full_name = private_name(name, self._ids) if is_private else as_text(shared_name, Argument("shared_name"))
        container = as_text(container, Argument("container"))
        target = self._cluster.home_of(container, full_name)
        request = messages_pb2.CreateParametersRequest(
            parameters=parameters_pb2.ParametersRef(container=container, name=full_name),
            spec=spec_of(_completed(options, model), model.components),
            lifetime=self._private[target].lifetime(idle_lease, is_private=is_private),
        )
        if is_private and model.values is None:
            raise _without_values("private parameters are always new")
        request.parameters.member = yield from self._cluster.member(target)
        with fields_named(lambda: [each.name for each in model.components]):
            info = yield from at_target(
                target, self._found_or_created(request, model, target, progress, is_private=is_private)
            )
        return self._wire(info, model.components, target, is_private=is_private)

    def find(
        self,
        options: ParametersOptions,
        shared_name: str | None,
        _progress: Progress | None = None,
        *,
        container: str,
        idle_lease: float | None,
    ) -> Operation[ParametersWire]:
        """Finds parameters by their name alone.

        Args:
            options: Properties, of which none may be given: those of the server hold.
            shared_name: The name.
            container: The namespace of the name.
            idle_lease: Must be None.

        Raises:
            NotFoundError: There are none, or they are private to another client.
        """
        given = [*given_names(options), *(["idle_lease"] if idle_lease is not None else ())]
        if shared_name is None:
            raise InvalidArgumentError(
                "expected values of private parameters, which are always new, or the shared_name of parameters that "
                "exist, got neither",
                field="values",
            )
        if given:
            raise InvalidArgumentError(
                f"expected values or shapes with {', '.join(given)}, got None: parameters that are found by their name "
                "alone have the properties that they were created with",
                field="values",
            )
        ref = parameters_pb2.ParametersRef(
            container=as_text(container, Argument("container")), name=as_text(shared_name, Argument("shared_name"))
        )
        target = self._cluster.home_of(ref.container, ref.name)
        ref.member = yield from self._cluster.member(target)
        title = f"parameters {ref.name!r} in container {ref.container or DEFAULT_CONTAINER!r}"
        try:
            info = yield from at_target(target, PARAMETERS.described(ref))
        except NotFoundError as error:
            raise NotFoundError(
                f"there are no {title}: create them with values, or call again when another client has created them",
                field="shared_name",
            ) from error
        if info.is_private:
            raise NotFoundError(f"{title} are private to another client", field="shared_name")
        shapes = shapes_of(info.spec)
        model = model_of(shapes[""] if shapes.keys() == {""} else shapes)
        return self._wire(info, model.components, target, is_private=False)

    def fork(
        self, wire: ParametersWire, step: int | None, shared_name: str, container: str, idle_lease: float | None
    ) -> Operation[ParametersWire]:
        """Creates parameters that begin with a version of others, on the same server.

        Args:
            wire: The others.
            step: The step of the version; None for the newest.
            shared_name: The name of the new ones.
            container: The namespace of the name.
            idle_lease: Seconds without use after which they are deleted; None: never.
        """
        ref = parameters_pb2.ParametersRef(
            container=as_text(container, Argument("container")), name=as_text(shared_name, Argument("shared_name"))
        )
        target = wire.target
        if (home := self._cluster.home_of(ref.container, ref.name)) != target:
            raise InvalidArgumentError(
                f"expected a name whose home is server {target} of the cluster, as that has the parameters, got "
                f"{ref.name!r}, whose home is server {home}: choose another one",
                field="shared_name",
            )
        ref.member = yield from self._cluster.member(target)
        lifetime = self._private[target].lifetime(idle_lease, is_private=False)
        with fields_named():
            info = yield from at_target(target, wire.fork(step, ref, lifetime))
        return self._wire(info, wire.components, target, is_private=False)

    def list_all(self, container: str) -> Operation[list[ParametersInfo]]:
        """Describes the parameters of a container, on all servers, sorted by name."""
        container = as_text(container, Argument("container"))
        if self._cluster.size == 1:
            return list((yield from _listed(container)))
        lists = yield from together(*[at_target(each, _listed(container)) for each in range(self._cluster.size)])
        return sorted(chain.from_iterable(lists), key=lambda info: info.name)

    def delete(self, container: str, name: str) -> Operation[bool]:
        """Deletes parameters by their name; returns whether they existed."""
        target = self._cluster.home_of(container, name)
        request = messages_pb2.DeleteParametersRequest(
            parameters=parameters_pb2.ParametersRef(container=container, name=name)
        )
        call = Unary(PARAMETERS.name, "DeleteParameters", request, target=target)
        reply: messages_pb2.DeleteParametersResponse = yield call
        self._deleted(target, container or DEFAULT_CONTAINER, name)
        return reply.deleted

    def _found_or_created(
        self,
        request: messages_pb2.CreateParametersRequest,
        model: Model,
        target: int,
        progress: Progress | None,
        *,
        is_private: bool,
    ) -> Operation[parameters_pb2.ParametersInfo]:
        """Finds parameters without sending values, which may be large; creates them with values if there are none.

        The server lets one client at a time find none: the others wait until it has sent its values.
        """
        if is_private:
            creation = _created(request, model, target, progress)
            return (yield from self._private[target].create(request.parameters.name, creation))
        if model.values is not None:
            request.creator = self._ids.private_name()
        # It may have to wait for as long as another client needs to send as much.
        num_bytes = sum([each.nbytes for each in arrays_of(model.values or {})[0]])
        try:
            found: Reply = yield Whole(Unary(PARAMETERS.name, _CREATE, request), reply_bytes=num_bytes)
        except NotFoundError as error:
            if model.values is None:
                raise _without_values(
                    f"there are no parameters {request.parameters.name!r} in container "
                    f"{request.parameters.container or DEFAULT_CONTAINER!r}"
                ) from error
        else:
            info: parameters_pb2.ParametersInfo = found.message.info
            return info
        return (yield from _created(request, model, target, progress))

    def _wire(
        self,
        info: parameters_pb2.ParametersInfo,
        components: ParameterComponents,
        target: int,
        *,
        is_private: bool,
    ) -> ParametersWire:
        watch = self._watches[target]
        session = RoundSession(
            info,
            self._memory,
            None,
            lambda: at_target(target, watch.begin()),
            service=PARAMETERS,
            is_private=is_private,
        )
        return ParametersWire(
            watch.add(session),
            components,
            self._ids,
            info.spec,
            deleted=partial(self._deleted, target),
            target=target,
        )

    def _deleted(self, target: int, container: str, name: str) -> None:
        self._private[target].deleted(name)
        self._watches[target].remove(container, name, PARAMETERS)


def _completed(options: ParametersOptions, model: Model) -> ParametersOptions:
    """Returns properties with the optimizer and the schedule of a saved run, unless an optimizer was given.

    Raises:
        InvalidArgumentError: The run was saved with another kind of updates.
    """
    saved = model.saved
    if saved is not None:
        saved.check_update(options.update)
    if options.optimizer is not None or saved is None or saved.state is None:
        return options
    schedule = options.schedule
    if schedule is None and saved.schedule is not None:
        schedule = schedule_of(saved.schedule)
    return replace(options, optimizer=optimizer_of(saved.state.optimizer), schedule=schedule)


def _created(
    request: messages_pb2.CreateParametersRequest, model: Model, target: int, progress: Progress | None
) -> Operation[parameters_pb2.ParametersInfo]:
    values, saved = model.values or {}, model.saved
    arrays: list[Any]
    arrays, has_handles = arrays_of(values)
    if has_handles and target:
        raise InvalidArgumentError(
            f"expected arrays, got the handle of a tensor: tensors are on server 0 of the cluster, and the home of "
            f"parameters {request.parameters.name!r} is server {target}",
            field="values",
        )
    state = saved.state if saved is not None else None
    if state is not None:
        if (ours := request.spec.optimizer.WhichOneof("kind")) != (theirs := state.optimizer.WhichOneof("kind")):
            raise InvalidArgumentError(
                f"expected optimizer {theirs}, whose state is in the file, got {ours}", field="optimizer"
            )
        arrays += state.slots.values()

    def with_values(tensors: Sequence[tensor_pb2.Tensor]) -> Message:
        message = messages_pb2.CreateParametersRequest()
        message.CopyFrom(request)
        message.release_handles = not has_handles
        message.step = 0 if saved is None else saved.step
        add_saved(message, values, state, tensors)
        return message

    reply = yield from call_with_arrays(
        PARAMETERS.name, _CREATE, arrays, with_values, released=not has_handles, progress=progress
    )
    info: parameters_pb2.ParametersInfo = reply.message.info
    return info


def _listed(container: str) -> Operation[Iterable[ParametersInfo]]:
    found: list[ParametersInfo] = []
    request = messages_pb2.ListParametersRequest(container=container)
    while True:
        reply: messages_pb2.ListParametersResponse = yield Unary(PARAMETERS.name, "ListParameters", request)
        found += map(info_of, reply.parameters)
        if not reply.next_page_token:
            return found
        request = messages_pb2.ListParametersRequest(container=container, page_token=reply.next_page_token)


def _without_values(why: str) -> NotFoundError:
    return NotFoundError(
        f"{why}, and only shapes were given to create them: give values, such as a dict of arrays by name",
        field="values",
    )
