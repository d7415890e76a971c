"""Access control: the rule of every method, the keys of local users, and the policy, which follows its file."""

from __future__ import annotations

import asyncio
import base64
import hmac
import logging
import secrets
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from gradserve_server.errors import PermissionDeniedError, UnauthenticatedError
from gradserve_server.limits import quoted
from gradserve_server.security.access_file import AccessFileError, read_policy
from gradserve_server.security.identity import ContainerLimits, Credentials, Identity, OwnLimits, Role, ShareRules

LIFETIME_SECONDS = 600.0
_SECRET_BYTES = 32
_CONTENTS = struct.Struct("!Id")
"""The user, and the time at which the key expires."""
_LOOK_SECONDS = 1.0
_REMIND_SECONDS = 600.0
"""The pause between two lines of the log about a file that stays unusable for the same reason."""
_log = logging.getLogger(__name__)
UNKNOWN_USER = Identity("")
"""The identity of somebody at a Unix socket until the user is known; it may ask for a ticket and nothing else."""


class Access:
    """Decides who may call what. Used on the event loop only; other threads may `identify` who shows no user key."""

    def __init__(self, path: Path, keys: UserKeys, clock: Callable[[], float] = time.monotonic) -> None:
        """Reads the file.

        Raises:
            AccessFileError: It is not valid.
        """
        self._path = path
        self._keys = keys
        self._clock = clock
        self._problem = ""
        self._problem_logged = 0.0
        self._seen = _signature(path)
        self._policy = read_policy(path)

    def identify(self, credentials: Credentials) -> Identity:
        """Returns the identity of a caller.

        Raises:
            UnauthenticatedError: The caller shows no credentials, or unknown ones.
        """
        if credentials.user_key:
            if not credentials.is_local:
                raise UnauthenticatedError("the key of a user counts at Unix sockets only")
            credentials = replace(credentials, uid=self._keys.user_of(credentials.user_key))
        return self._policy.identify(credentials)

    def user_key(self, credentials: Credentials) -> str:
        """Returns a key for a user at a Unix socket who shows nothing else; for others, nothing."""
        if credentials.uid is None or credentials.token_digest or credentials.certificate or credentials.problem:
            return ""
        return self._keys.issue(credentials.uid)

    def limits_of(self, name: str) -> OwnLimits:
        """Returns the limits of the identity of this name."""
        return self._policy.limits_of(name)

    def container_limits(self, container: str) -> ContainerLimits:
        """Returns the limits of a container."""
        return self._policy.container_limits(container)

    def admit(self, credentials: Credentials, method: str, rule: Rule, container: str | None) -> Admitted:
        """Returns the caller of a method.

        Args:
            credentials: What the caller shows.
            method: The method, for errors.
            rule: Its rule.
            container: The container that the request names; None if it names none.

        Raises:
            UnauthenticatedError: The caller is unknown.
            PermissionDeniedError: Its role is too low.
        """
        if rule.for_unknown_users and self._may_be_known_later(credentials):
            return Admitted(UNKNOWN_USER)
        identity = self.identify(credentials)
        role = identity.highest_role if container is None else identity.role_in(container)
        wanted = rule.role
        if wanted is None or (role is not None and role >= wanted):
            return Admitted(identity)
        denied = _denied(identity, method, wanted, container, role)
        if rule.opening is not None and role is not None and role >= rule.opening:
            return Admitted(identity, denied)
        raise denied

    def _may_be_known_later(self, credentials: Credentials) -> bool:
        # A key does not matter here: with one that has expired, a client asks for another.
        others = credentials.problem or credentials.token_digest or credentials.certificate
        return credentials.is_local and not others and credentials.uid is None and bool(self._policy.by_uid)

    async def follow(self) -> None:
        """Reads the file again whenever it has changed, until it is cancelled."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            await asyncio.to_thread(self.look)

    def look(self) -> None:
        """Reads the file again if it has changed, and as long as it cannot be used.

        The policy stays as it is then; the log says so at once, and again every ten minutes.
        """
        found = _signature(self._path)
        if found == self._seen and not self._problem:
            return
        try:
            self._policy = read_policy(self._path)
        except AccessFileError as error:
            # Read again at the next look: the reason may have been the machine's, not the file's.
            self._note(str(error))
        else:
            self._problem = ""
            _log.info("read the access file %s again", self._path)
        self._seen = found

    def _note(self, problem: str) -> None:
        now = self._clock()
        if problem != self._problem or now - self._problem_logged >= _REMIND_SECONDS:
            self._problem_logged = now
            _log.error("%s; the policy stays as it was: identities and tokens removed since still count", problem)
        self._problem = problem


@dataclass(frozen=True)
class Admitted:
    """A caller that may make a call.

    Attributes:
        identity: The caller.
        may_only_open: The error for creating what does not exist, and for takes; None if the caller may.
    """

    identity: Identity
    may_only_open: PermissionDeniedError | None = None


def _signature(path: Path) -> tuple[int, ...] | None:
    """Returns what differs once a file has changed; None if it is not there."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino


def _denied(
    identity: Identity, method: str, wanted: Role, container: str | None, role: Role | None
) -> PermissionDeniedError:
    where = "any container" if container is None else f"the container {quoted(container)}"
    has = "no role" if role is None else f"the role {role}"
    return PermissionDeniedError(
        f"{method} needs the role {wanted} in {where}; {identity.name!r} has {has} there", code="GS_ROLE"
    )


def no_rule(method: str) -> PermissionDeniedError:
    """Returns the error of a method that has no rule."""
    return PermissionDeniedError(f"nobody may call {method}: it has no rule")


def share_rules(reserved: float, access: Access | None) -> ShareRules:
    """Returns the rules of a server; on one without access control nobody has a share, and nothing has limits."""
    if access is None:
        return ShareRules(has_identities=False)
    return ShareRules(reserved, access.limits_of, access.container_limits)


class UserKeys:
    """Makes and checks the keys of users.

    gRPC does not say which user is at the other end of a Unix socket; the kernel does, for a socket of the server's
    own. Over that one a client gets a key: the number of its user and a time of expiry, with their HMAC under a secret
    of 256 random bits that never leaves this object. So nothing has to be kept for a key, and none outlives the server.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._secret = secrets.token_bytes(_SECRET_BYTES)

    def issue(self, uid: int) -> str:
        """Returns a key of a user, visible ASCII characters without spaces."""
        contents = _CONTENTS.pack(uid, self._clock() + LIFETIME_SECONDS)
        return base64.urlsafe_b64encode(contents + self._code(contents)).decode()

    def user_of(self, key: str) -> int:
        """Returns the user whose key this is.

        Raises:
            UnauthenticatedError: It is nobody's, or nobody's any more.
        """
        try:
            shown = base64.urlsafe_b64decode(key.encode())
        except ValueError:
            shown = b""
        contents, code = shown[: _CONTENTS.size], shown[_CONTENTS.size :]
        if hmac.compare_digest(code, self._code(contents)):
            uid: int
            uid, end = _CONTENTS.unpack(contents)
            if self._clock() < end:
                return uid
        raise UnauthenticatedError(
            "the key of this user has expired, or is of another run of the server", code="GS_UNKNOWN_CREDENTIALS"
        )

    def _code(self, contents: bytes) -> bytes:
        return hmac.digest(self._secret, contents, "sha256")


@dataclass(frozen=True)
class Rule:
    """The rule of one method.

    Attributes:
        role: The role that its caller needs; None: anybody may call it, without credentials too.
        containers: The paths of the fields of the request that may name the container: the first whose message is set
            counts. Without any, the role in any container is enough.
        opening: The role that is enough to open what exists, for a method that creates what does not; for creations and
            takes, also for what belongs to another: `AccumulatorRegistry.belongs_to_another`. None: `role`.
        for_unknown_users: Whether somebody at a Unix socket, whose user is not known yet, may call it.
        also_in: The paths of fields that name another container, in which the caller needs the role, too.
    """

    role: Role | None
    containers: tuple[str, ...] = ()
    opening: Role | None = None
    for_unknown_users: bool = False
    also_in: tuple[str, ...] = ()


_ANYBODY = Rule(None)
_WORKER_ANYWHERE = Rule(Role.WORKER)
_ACCUMULATOR = ("accumulator.container",)
_LAYER = ("layer.container",)
_PARAMETERS = ("parameters.container",)
_LIST = ("container",)
RULES: Mapping[str, Rule] = {
    "grpc.health.v1.Health.Check": _ANYBODY,
    "grpc.health.v1.Health.List": _ANYBODY,
    "grpc.health.v1.Health.Watch": _ANYBODY,
    "grpc.reflection.v1.ServerReflection.ServerReflectionInfo": _WORKER_ANYWHERE,
    "grpc.reflection.v1alpha.ServerReflection.ServerReflectionInfo": _WORKER_ANYWHERE,
    "gradserve.v1.AccumulatorService.ApplyGradient": Rule(Role.WORKER, _ACCUMULATOR),
    "gradserve.v1.AccumulatorService.CreateAccumulator": Rule(Role.CHIEF, _ACCUMULATOR, opening=Role.WORKER),
    "gradserve.v1.AccumulatorService.DeleteAccumulator": Rule(Role.CHIEF, _ACCUMULATOR),
    "gradserve.v1.AccumulatorService.EndEpoch": Rule(Role.WORKER, _ACCUMULATOR),
    "gradserve.v1.AccumulatorService.ForgetGradients": Rule(Role.WORKER, _ACCUMULATOR),
    "gradserve.v1.AccumulatorService.GetAccumulator": Rule(Role.WORKER, _ACCUMULATOR),
    "gradserve.v1.AccumulatorService.GetNumAccumulated": Rule(Role.WORKER, _ACCUMULATOR),
    "gradserve.v1.AccumulatorService.ListAccumulators": Rule(Role.WORKER, _LIST),
    "gradserve.v1.AccumulatorService.PushPull": Rule(Role.WORKER, _ACCUMULATOR),
    "gradserve.v1.AccumulatorService.ReadAverage": Rule(Role.WORKER, _ACCUMULATOR),
    "gradserve.v1.AccumulatorService.ReduceGradients": Rule(Role.WORKER, _ACCUMULATOR),
    "gradserve.v1.AccumulatorService.SetGlobalStep": Rule(Role.CHIEF, _ACCUMULATOR),
    "gradserve.v1.AccumulatorService.StageGradient": Rule(Role.WORKER, _ACCUMULATOR),
    "gradserve.v1.AccumulatorService.TakeGradient": Rule(Role.CHIEF, _ACCUMULATOR, opening=Role.WORKER),
    "gradserve.v1.BatchNormLayerService.BatchNormBackward": Rule(Role.WORKER, _LAYER),
    "gradserve.v1.BatchNormLayerService.BatchNormForward": Rule(Role.WORKER, _LAYER),
    "gradserve.v1.BatchNormLayerService.CreateBatchNormLayer": Rule(Role.CHIEF, _LAYER, opening=Role.WORKER),
    "gradserve.v1.BatchNormLayerService.DeleteBatchNormLayer": Rule(Role.CHIEF, _LAYER),
    "gradserve.v1.BatchNormLayerService.DescribeBatchNormLayer": Rule(Role.WORKER, _LAYER),
    "gradserve.v1.BatchNormLayerService.GetBatchNormVariables": Rule(Role.WORKER, _LAYER),
    "gradserve.v1.BatchNormLayerService.ListBatchNormLayers": Rule(Role.WORKER, _LIST),
    "gradserve.v1.BatchNormLayerService.ReleaseBatchNormForwards": Rule(Role.WORKER, _LAYER),
    "gradserve.v1.BatchNormLayerService.RunBatchNormUpdates": Rule(
        Role.CHIEF, ("layer.container", "collection.container")
    ),
    "gradserve.v1.BatchNormLayerService.SetBatchNormVariables": Rule(Role.CHIEF, _LAYER),
    "gradserve.v1.GradientOpsService.CudnnRNN": _WORKER_ANYWHERE,
    "gradserve.v1.GradientOpsService.CudnnRNNBackprop": _WORKER_ANYWHERE,
    "gradserve.v1.GradientOpsService.CudnnRNNCanonicalToParams": _WORKER_ANYWHERE,
    "gradserve.v1.GradientOpsService.CudnnRNNParamsSize": _WORKER_ANYWHERE,
    "gradserve.v1.GradientOpsService.CudnnRNNParamsToCanonical": _WORKER_ANYWHERE,
    "gradserve.v1.GradientOpsService.FusedBatchNorm": _WORKER_ANYWHERE,
    "gradserve.v1.GradientOpsService.FusedBatchNormGrad": _WORKER_ANYWHERE,
    "gradserve.v1.GradientOpsService.GRUBlockCell": _WORKER_ANYWHERE,
    "gradserve.v1.GradientOpsService.GRUBlockCellGrad": _WORKER_ANYWHERE,
    "gradserve.v1.GradientOpsService.LayerNorm": _WORKER_ANYWHERE,
    "gradserve.v1.GradientOpsService.LayerNormGrad": _WORKER_ANYWHERE,
    "gradserve.v1.LeaseService.EndClientLease": _WORKER_ANYWHERE,
    "gradserve.v1.LeaseService.HoldClientLease": _WORKER_ANYWHERE,
    "gradserve.v1.ParameterService.ChangeParameters": Rule(Role.CHIEF, _PARAMETERS),
    "gradserve.v1.ParameterService.CountUpdates": Rule(Role.WORKER, _PARAMETERS),
    "gradserve.v1.ParameterService.CreateParameters": Rule(Role.CHIEF, _PARAMETERS, opening=Role.WORKER),
    "gradserve.v1.ParameterService.DeleteParameters": Rule(Role.CHIEF, _PARAMETERS),
    "gradserve.v1.ParameterService.ForgetUpdates": Rule(Role.WORKER, _PARAMETERS),
    "gradserve.v1.ParameterService.ForkParameters": Rule(Role.CHIEF, ("fork.container",), also_in=_PARAMETERS),
    "gradserve.v1.ParameterService.GetParameters": Rule(Role.WORKER, _PARAMETERS),
    "gradserve.v1.ParameterService.ListEvaluations": Rule(Role.WORKER, _PARAMETERS),
    "gradserve.v1.ParameterService.ListParameters": Rule(Role.WORKER, _LIST),
    "gradserve.v1.ParameterService.ListRounds": Rule(Role.WORKER, _PARAMETERS),
    "gradserve.v1.ParameterService.Push": Rule(Role.WORKER, _PARAMETERS),
    "gradserve.v1.ParameterService.PushPullParameters": Rule(Role.WORKER, _PARAMETERS),
    "gradserve.v1.ParameterService.ReadParameters": Rule(Role.WORKER, _PARAMETERS),
    "gradserve.v1.ParameterService.ReportEvaluation": Rule(Role.WORKER, _PARAMETERS),
    "gradserve.v1.ParameterService.StageUpdate": Rule(Role.WORKER, _PARAMETERS),
    "gradserve.v1.ServerService.GetLog": _WORKER_ANYWHERE,  # which checks that the caller reaches all
    "gradserve.v1.ServerService.GetServerInfo": _WORKER_ANYWHERE,
    "gradserve.v1.ServerService.GetServerStatus": _WORKER_ANYWHERE,
    "gradserve.v1.SocketService.IssueTicket": Rule(Role.WORKER, for_unknown_users=True),
    "gradserve.v1.TensorService.DeleteTensors": _WORKER_ANYWHERE,
    "gradserve.v1.TensorService.GetTensors": _WORKER_ANYWHERE,
    "gradserve.v1.TensorService.ListTensors": _WORKER_ANYWHERE,
    "gradserve.v1.TensorService.PutTensors": _WORKER_ANYWHERE,
    "gradserve.v1.TensorService.ReadTensors": _WORKER_ANYWHERE,
    "gradserve.v1.TensorService.StoreTensors": _WORKER_ANYWHERE,
}
"""The rules by the full names of methods. A method without a rule is refused.

Tensors have no container: each identity reaches its own. ListTensors lists those that its caller reaches, which are all
tensors of the server for an admin of all containers.
"""
