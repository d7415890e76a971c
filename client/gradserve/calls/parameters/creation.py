"""Finds parameters, or creates them; lists and deletes them by name."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain

from gradserve.calls.accumulators.components import Sent, arrays_of
from gradserve.calls.accumulators.kept import KeptMemory
from gradserve.calls.accumulators.session import RoundSession, Watch
from gradserve.calls.accumulators.sharding.shard import Parts, Uncounted, add_plan, plan_in, remove_plan
from gradserve.calls.combinators import all_ended, at_target, together
from gradserve.calls.exchange import Operation, Progress, Reply, Unary, Whole
from gradserve.calls.identity import RequestIds, private_name
from gradserve.calls.lease import ClientLease
from gradserve.calls.parameters.fields import fields_named
from gradserve.calls.parameters.model import Model, ParameterComponents, model_of
from gradserve.calls.parameters.shard_creation import Creation, created, found_or_created
from gradserve.calls.parameters.sharded import ShardedParametersWire
from gradserve.calls.parameters.spec import ParametersOptions, given_names, info_of, shapes_of, spec_of
from gradserve.calls.parameters.wire import PARAMETERS, ParametersWire
from gradserve.calls.server import Cluster
from gradserve.conversion.plain import as_text
from gradserve.optim.messages import optimizer_of, schedule_of
from gradserve.parameter_records import ParametersInfo
from gradserve.saved.parameters import SavedParameters
from gradserve_protocol.argument import Argument
from gradserve_protocol.errors import InvalidArgumentError, NotFoundError
from gradserve_protocol.messages import decode_duration
from gradserve_protocol.placement import DEFAULT_CONTAINER, plan_of
from gradserve_protocol.v1 import parameters_messages_pb2 as messages_pb2
from gradserve_protocol.v1 import parameters_pb2

_CREATE = "CreateParameters"
_UPDATE = "update"


class ParametersCache:
    """Opens a client's parameters, each on its home among the servers. Safe to use from several threads."""

    def __init__(
        self,
        ids: RequestIds,
        cluster: Cluster,
        leases: Sequence[ClientLease],
        memory: KeptMemory,
        watches: Sequence[Watch],
    ) -> None:
        """Takes the state of the client.

        Args:
            ids: Its request ids.
            cluster: Its servers.
            leases: Its lease at each of them.
            memory: The memory of the contributions that it keeps.
            watches: The watch over these, for each server.
        """
        self._ids = ids
        self._cluster = cluster
        self._leases = leases
        self._memory = memory
        self._watches = watches
        self._uncounted = Uncounted()

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
            lifetime=self._leases[target].lifetime(idle_lease, is_private=is_private),
        )
        if is_private and model.values is None:
            raise _without_values("private parameters are always new")
        request.parameters.member = yield from self._cluster.member(target)
        if self._cluster.size == 1:
            request.sharded = options.sharded  # an aggregator has several servers
        elif options.sharded:
            return (yield from self._open_sharded(request, model, target, progress, is_private=is_private))
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
            with fields_named():
                info = yield from at_target(target, PARAMETERS.described(ref))
        except NotFoundError as error:
            raise NotFoundError(
                f"there are no {title}: create them with values, or call again when another client has created them",
                field="shared_name",
                code="GS_NO_PARAMETERS",
            ) from error
        if info.is_private:
            raise NotFoundError(f"{title} are private to another client", field="shared_name")
        shapes = shapes_of(info.spec)
        model = model_of(shapes[""] if shapes.keys() == {""} else shapes)
        if info.spec.num_shards:
            return (yield from self._sharded_wire(info, model.components, target, is_private=False))
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
        if isinstance(wire, ShardedParametersWire):
            return (yield from self._fork_sharded(wire, step, ref, idle_lease))
        target = wire.target
        if (home := self._cluster.home_of(ref.container, ref.name)) != target:
            raise InvalidArgumentError(
                f"expected a name whose home is server {target} of the cluster, as that has the parameters, got "
                f"{ref.name!r}, whose home is server {home}: choose another one",
                field="shared_name",
            )
        ref.member = yield from self._cluster.member(target)
        lifetime = self._leases[target].lifetime(idle_lease, is_private=False)
        with fields_named():
            info = yield from at_target(target, wire.fork(step, ref, lifetime))
        return self._wire(info, wire.components, target, is_private=False)

    def list_all(self, container: str) -> Operation[list[ParametersInfo]]:
        """Describes the parameters of a container, on all servers, sorted by name."""
        container = as_text(container, Argument("container"))
        if self._cluster.size == 1:
            return list((yield from _listed(container)))
        lists = yield from together(*[at_target(each, _listed(container)) for each in range(self._cluster.size)])
        sizes = Counter[str]()
        for info in chain.from_iterable(lists):
            sizes[info.name] += info.num_bytes
        at_home = [
            replace(info, num_bytes=sizes[info.name], digest="" if info.num_shards else info.digest)
            for target, found in enumerate(lists)
            for info in found
            if not info.num_shards or self._cluster.home_of(container, info.name) == target
        ]
        return sorted(at_home, key=lambda info: info.name)

    def delete(self, container: str, name: str) -> Operation[bool]:
        """Deletes parameters by their name; returns whether they existed."""
        target = self._cluster.home_of(container, name)
        ref = parameters_pb2.ParametersRef(container=container, name=name)
        is_whole = self._cluster.size == 1
        if not is_whole:
            with suppress(NotFoundError):
                info = yield from at_target(target, PARAMETERS.described(ref))
                is_whole = not info.spec.num_shards
        reply = yield from self._deleted_at(target, ref, "")
        if is_whole:
            return reply.deleted
        # Also what is left on other servers of some that their home has lost.
        others = [each for each in range(self._cluster.size) if each != target]
        replies = yield from all_ended(*[self._deleted_at(each, ref, reply.home_incarnation) for each in others])
        return any(each.deleted for each in [reply, *replies])

    def _deleted_at(
        self, target: int, ref: parameters_pb2.ParametersRef, home_incarnation: str
    ) -> Operation[messages_pb2.DeleteParametersResponse]:
        request = messages_pb2.DeleteParametersRequest(parameters=ref, home_incarnation=home_incarnation)
        call = Unary(PARAMETERS.name, "DeleteParameters", request, target=target)
        reply: messages_pb2.DeleteParametersResponse = yield call
        self._deleted(target, ref.container or DEFAULT_CONTAINER, ref.name)
        return reply

    # Sharded

    def _open_sharded(
        self,
        request: messages_pb2.CreateParametersRequest,
        model: Model,
        home: int,
        progress: Progress | None,
        *,
        is_private: bool,
    ) -> Operation[ParametersWire]:
        """Finds sharded parameters, or creates them: first on all servers but their home, which then decides."""
        size = self._cluster.size
        plan = plan_of(model.components, home, size)
        add_plan(request.spec, plan, size)
        parts = Parts(model.components, plan, _UPDATE)
        if model.values is not None:
            request.creator = self._ids.private_name()
        saved = model.saved
        state, step = (None, 0) if saved is None else (saved.state, saved.step)
        members = yield from self._cluster.members(parts.servers)

        def create_at(
            target: int, creation: Operation[messages_pb2.CreateParametersResponse]
        ) -> Operation[messages_pb2.CreateParametersResponse]:
            if is_private:
                return at_target(target, self._leases[target].create(request.parameters.name, creation))
            return at_target(target, creation)

        creation = Creation(request, parts, members, model.values, state, step)
        try:
            with fields_named(lambda: [each.name for each in model.components]):
                response = yield from found_or_created(creation, home, create_at, progress)
        except NotFoundError as error:
            raise _without_values(
                f"there are no parameters {request.parameters.name!r} in container "
                f"{request.parameters.container or DEFAULT_CONTAINER!r}"
            ) from error
        return (yield from self._sharded_wire(response.info, model.components, home, is_private=is_private))

    def _fork_sharded(
        self, wire: ShardedParametersWire, step: int | None, ref: parameters_pb2.ParametersRef, idle_lease: float | None
    ) -> Operation[ParametersWire]:
        """Creates sharded parameters with the values of a version of others, which this client reads and sends."""
        if step is None:
            read = yield from wire.read_state(with_state=True)
            version, state = read.version, read.state
        else:
            version, state = (yield from wire.read(step, 0.0)), None
        info = yield from wire.described()
        target = self._cluster.home_of(ref.container, ref.name)
        request = messages_pb2.CreateParametersRequest(
            parameters=ref, spec=info.spec, lifetime=self._leases[target].lifetime(idle_lease, is_private=False)
        )
        remove_plan(request.spec)
        request.parameters.member = yield from self._cluster.member(target)
        saved = SavedParameters(version.components, version.step, version.digest, state, None)
        values: dict[str, Sent] = {each.name: version.components[each.name] for each in wire.components}
        model = Model(wire.components, values, saved)
        return (yield from self._open_sharded(request, model, target, None, is_private=False))

    def _sharded_wire(
        self, info: parameters_pb2.ParametersInfo, components: ParameterComponents, home: int, *, is_private: bool
    ) -> Operation[ParametersWire]:
        if info.spec.num_shards != self._cluster.size:
            raise InvalidArgumentError(
                f"expected a client of all {info.spec.num_shards} servers over which parameters "
                f"{info.parameters.name!r} are sharded, got one of {self._cluster.size}",
                field="sharded",
            )
        parts = Parts(components, plan_in(info.spec), _UPDATE)
        members = yield from self._cluster.members(parts.servers)
        lifetime = self._leases[home].lifetime(decode_duration(info, "idle_lease"), is_private=is_private)

        def create_shard(target: int, incarnation: str, values: Mapping[str, Sent]) -> Operation[object]:
            request = messages_pb2.CreateParametersRequest(
                parameters=info.parameters, spec=info.spec, lifetime=lifetime, home_incarnation=incarnation
            )
            request.parameters.ClearField("incarnation")
            request.parameters.member = members[target]
            return at_target(target, created(request, values, None, 0, target, None))

        return ShardedParametersWire(
            self._session(info, home, is_private=is_private),
            components,
            self._ids,
            info.spec,
            deleted=self._deleted_everywhere,
            be_worker=partial(self._be_worker, home),
            target=home,
            parts=parts,
            members=members,
            uncounted=self._uncounted,
            create_shard=create_shard,
            idle_lease=decode_duration(info, "idle_lease"),
        )

    def _deleted_everywhere(self, container: str, name: str) -> None:
        for target in range(self._cluster.size):
            self._deleted(target, container, name)

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
            creation = _created_of(request, model, target, progress)
            return (yield from self._leases[target].create(request.parameters.name, creation))
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
        return (yield from _created_of(request, model, target, progress))

    def _wire(
        self,
        info: parameters_pb2.ParametersInfo,
        components: ParameterComponents,
        target: int,
        *,
        is_private: bool,
    ) -> ParametersWire:
        return ParametersWire(
            self._session(info, target, is_private=is_private),
            components,
            self._ids,
            info.spec,
            deleted=partial(self._deleted, target),
            be_worker=partial(self._be_worker, target),
            target=target,
        )

    def _session(self, info: parameters_pb2.ParametersInfo, target: int, *, is_private: bool) -> RoundSession:
        watch = self._watches[target]
        session = RoundSession(
            info,
            self._memory,
            None,
            lambda: at_target(target, watch.begin()),
            service=PARAMETERS,
            is_private=is_private,
        )
        return watch.add(session)

    def _be_worker(self, target: int) -> Operation[None]:
        return at_target(target, self._leases[target].be_worker())

    def _deleted(self, target: int, container: str, name: str) -> None:
        self._leases[target].deleted(name)
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


def _created_of(
    request: messages_pb2.CreateParametersRequest, model: Model, target: int, progress: Progress | None
) -> Operation[parameters_pb2.ParametersInfo]:
    """Creates the parameters of a model on one server."""
    saved = model.saved
    state, step = (None, 0) if saved is None else (saved.state, saved.step)
    response = yield from created(request, model.values or {}, state, step, target, progress)
    return response.info


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
        code="GS_NO_PARAMETERS",
    )
