"""The operations on parameters that are sharded over several servers."""

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast

from google.protobuf.message import Message

from gradserve.calls.accumulators.components import Sent
from gradserve.calls.accumulators.contributions import Given, is_in_place
from gradserve.calls.accumulators.service import Method, without_run
from gradserve.calls.accumulators.sharding.staging import EPOCH_FIELD, StagedFor, StagingWire
from gradserve.calls.exchange import Operation, Progress, Reply, Whole, Work
from gradserve.calls.parameters.compression import Packer
from gradserve.calls.parameters.fields import fields_named
from gradserve.calls.parameters.model import check_saved
from gradserve.calls.parameters.shards import NOT_STAGED_FIELD, CreateShard, ParameterShards
from gradserve.calls.parameters.spec import info_of, update_of
from gradserve.calls.parameters.wire import PARAMETERS, ParametersWire, ReadState, version_of
from gradserve.codecs import Codec
from gradserve.parameter_records import ParametersInfo, Version
from gradserve.saved.parameters import SavedParameters
from gradserve_protocol.arrays import Array
from gradserve_protocol.digest import digest_of
from gradserve_protocol.errors import AbortedError, GradserveError, OutOfRangeError
from gradserve_protocol.v1 import codecs_pb2, parameters_pb2
from gradserve_protocol.v1 import parameters_messages_pb2 as messages_pb2

_DELETE = Method("DeleteParameters", messages_pb2.DeleteParametersRequest)


class ShardedParametersWire(StagingWire, ParametersWire):
    """The operations on sharded parameters.

    Their home decides about rounds. Each server gets its pieces of an update before that, and makes its pieces of the
    version from what the home has decided, when it is read.
    """

    def __init__(self, *args: Any, members: Mapping[int, str], create_shard: CreateShard, **kwargs: Any) -> None:
        """Takes the parameters, and the parts of the servers.

        Args:
            *args: See `StagingWire`.
            members: The servers that have a part, as requests name them.
            create_shard: Creates the shard of a server that has lost it.
            **kwargs: See `StagingWire`.
        """
        super().__init__(*args, **kwargs)
        self._create_shard = create_shard
        self._plain = {"without_values": True}
        self._packer = Packer(self.ref.name, self.components, self._parts.rows_of)
        self._shards = ParameterShards(
            self.components,
            self._parts,
            self.target,
            members,
            self._uncounted,
            ref=lambda: self.ref,
            described=self.described,
            at_home=self._unary,
        )

    def aimed(self, operation: Operation[Any]) -> Operation[Any]:
        """Returns the operation itself, whose calls go to several servers."""
        return operation

    def info(self) -> Operation[ParametersInfo]:
        """Describes the parameters, with the memory that they use on all servers, and without a digest."""
        found = yield from super().info()
        elsewhere = yield from self._shards.num_bytes_elsewhere()
        return replace(found, num_bytes=found.num_bytes + elsewhere, digest="")

    def delete(self) -> Operation[bool]:
        """Deletes the parameters: first at their home, so that nobody reads a version of which a part is gone."""
        ref = without_run(self.ref)
        reply: messages_pb2.DeleteParametersResponse = yield self._unary(_DELETE.name, PARAMETERS.request(_DELETE, ref))
        yield from self._shards.delete(reply.home_incarnation)
        self._deleted(ref.container, ref.name)
        return reply.deleted

    def read_state(self, progress: Progress | None = None, *, with_state: bool) -> Operation[ReadState]:
        """Returns the newest version and the state of the optimizer, as they are to be saved."""
        info = yield from self.described()
        whole = yield from self._shards.read_state(with_state=with_state)
        schedule = info.spec.schedule if info.spec.HasField("schedule") else None
        version = version_of(whole.version, whole.components, None)
        return ReadState(version, whole.state, schedule, update_of(info.spec))

    def load(
        self, saved: SavedParameters, progress: Progress | None = None, *, with_state: bool
    ) -> Operation[ParametersInfo]:
        """Makes saved parameters the next version."""
        info = yield from self.described()
        check_saved(saved, info.spec, self.components, with_state=with_state)
        saved.check_update(update_of(info.spec))
        call = self._call(None)
        values: dict[str, Sent] = {each.name: saved.components[each.name] for each in self.components}
        change = messages_pb2.ChangeParametersRequest(step=saved.step)
        self._address(change, call)
        state = saved.state if with_state else None
        try:
            with fields_named(values="path"):
                reply = yield from self._shards.load(
                    change, values, state, self._create_shard, progress, self._session.renew
                )
        except GradserveError as error:
            self._identify(error, call)
            raise
        loaded = info_of(reply.message.info)
        with suppress(OutOfRangeError):  # later rounds have ended, and others bring them to the servers
            yield from self._shards.tell((yield from self._version_at(loaded.step)))
        return replace(loaded, digest="")

    # Updates

    def _use(self, target: int) -> Operation[object]:
        return self._shards.described(target)

    def _is_to_stage_again(self, error: AbortedError) -> Operation[bool]:
        if error.field == EPOCH_FIELD:
            self._session.epoch = (yield from self.described()).epoch
            return True
        return error.field == NOT_STAGED_FIELD  # the home has been started again, and has lost it

    def _stage_at(
        self, target: int, given: Given, values: Mapping[str, Sent], staged: StagedFor, progress: Progress | None
    ) -> Operation[Message | None]:
        staging = messages_pb2.StageUpdateRequest(local_step=given.local_step, release_handles=True, epoch=staged.epoch)
        staging.parameters.incarnation = staged.incarnation
        staging.request_id.client_id, staging.request_id.sequence = given.call
        return self._shards.stage(target, staging, values, self._key, progress)

    def _tell(self, message: Any, staged: StagedFor) -> None:
        super()._tell(message, staged)
        del message.measured[:]
        message.measured.extend(staged.answers)

    def _forget_uncounted(self, targets: Collection[int]) -> Operation[None]:
        """Ends the epoch, and tries to have servers forget what was staged in it and does not count."""
        epoch = yield from self._shards.forget_uncounted(targets)
        if epoch is not None:
            self._session.epoch = max(self._session.epoch, epoch)

    # Versions

    def read(
        self,
        step: int | None,
        timeout: float,
        progress: Progress | None = None,
        *,
        copy: bool = True,
        codec: Codec | None = None,
    ) -> Operation[Version]:
        """Returns a version; waits for a future one, but not for the newest."""
        in_place = is_in_place(copy)
        # Its number keeps the version at the home until all servers have sent their pieces.
        with self._ids.open_calls.opened(self._key, self._ids.new_call, may_come_again=False) as call:
            request = self._read_request(step, timeout, codec)
            self._address(request, call)
            asked = self._unary("ReadParameters", request, 0.0 if step is None else timeout)
            reply = yield from self._waited(Whole(asked))
            return (yield from self._receive_version(request, reply, progress, in_place=in_place))

    def _read_request(
        self, step: int | None, timeout: float, codec: Codec | None = None
    ) -> messages_pb2.ReadParametersRequest:
        request = super()._read_request(step, timeout, codec)
        request.without_values = True
        return request

    def _receive_version(
        self, request: Any, reply: Reply, progress: Progress | None, *, in_place: bool
    ) -> Operation[Version]:
        message: parameters_pb2.Version = reply.message.version
        self._learn(request, message)
        codec: codecs_pb2.Codec = request.codec
        values = yield from self._shards.read(message, progress, in_place=in_place, codec=codec)
        message.codec = codec
        if codec:  # only servers have the values that the version's digest is of
            message.ClearField("digest")
        else:
            in_order = [cast("Array", values[each.name]) for each in self.components]
            message.digest = yield Work(lambda: digest_of(in_order))  # instead of that of the home's pieces
        return version_of(message, *self.components.average(values))

    def _version_at(self, step: int) -> Operation[parameters_pb2.Version]:
        request = self._read_request(step, 0.0)
        reply: messages_pb2.ReadParametersResponse = yield self._unary("ReadParameters", request)
        return reply.version
