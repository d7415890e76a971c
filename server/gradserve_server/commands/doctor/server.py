"""Checks of what a server says of itself: access, versions, transport, speed, memory, training."""

import shlex
import statistics
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from gradserve_server.commands.doctor.subject import Observation, Subject, ok, problem, warning
from gradserve_server.commands.info import disk_text
from gradserve_server.commands.servers import misplaced
from gradserve_server.commands.wording import duration, size

if TYPE_CHECKING:
    import gradserve
    from gradserve_protocol.server_status import AccumulatorStatus, ParametersStatus

_NEW_TOKEN = "gradserve token NAME --role worker --access FILE on the server, then here export GRADSERVE_TOKEN=TOKEN"


def check_access(subject: Subject) -> Iterator[Observation]:
    """Asks as the identity of the token, and finds out its role."""
    import gradserve

    try:
        info = subject.info
    except gradserve.UnauthenticatedError as error:
        if subject.settings.token is not None:
            yield problem(f"the token of GRADSERVE_TOKEN is refused: {error}", _NEW_TOKEN)
        else:
            yield problem(f"the server has access control, and no token was shown: {error}", _NEW_TOKEN)
        return
    except gradserve.PermissionDeniedError as error:
        yield problem(str(error), _role(subject, "worker"))
        return
    if subject.num_servers > 1 and (where := misplaced(info.member, subject.index, subject.num_servers)):
        yield problem(where, "give all servers of the cluster in their order")
    if not info.identities:
        yield ok("no access control")
        return
    try:
        subject.client.list_accumulators(subject.container)
        # Deleting what nobody has made needs the role of a chief, and changes nothing.
        subject.client.delete_accumulator(f"gradserve-doctor/{uuid.uuid4().hex}", subject.container)
    except gradserve.PermissionDeniedError as error:
        if "needs the role chief" not in error.message:
            yield problem(str(error), _role(subject, "worker"))
        elif subject.status.num_accumulators or subject.status.num_parameters:
            yield ok(f"the role worker: may use what exists, and create nothing ({_whose(info)})")
        else:
            yield warning(
                f"the role worker may not create what it needs, and nothing exists yet ({_whose(info)})",
                f"start the chief first, or {_role(subject, 'chief')}",
            )
    else:
        yield ok(f"the role chief or admin: may create what it needs ({_whose(info)})")


def _whose(info: "gradserve.ServerInfo") -> str:
    return f"identity {min(info.identities)}" if len(info.identities) == 1 else "an admin of all containers"


def _role(subject: Subject, role: str) -> str:
    where = f" --container {shlex.quote(subject.container)}" if subject.container else ""
    return f"gradserve token NAME --role {role}{where} --access FILE on the server, or a line in its access file"


def check_versions(subject: Subject) -> Iterator[Observation]:
    """Compares the versions of client and server."""
    import gradserve

    server = subject.info.version
    if server == gradserve.__version__:
        yield ok(f"client and server are gradserve {server}")
    else:
        yield warning(
            f"the client is gradserve {gradserve.__version__}, the server {server}: calls that one of them "
            "lacks are refused as UNIMPLEMENTED",
            "pip install the same version on both sides",
        )


_TRANSPORT_CURES = (
    ("was asked for", "unset GRADSERVE_TRANSPORT"),
    ("through the proxy", "see the cure of the check address"),
    ("shared_memory: the server has no socket", "gradserve serve --shared-memory-socket auto, not off"),
    ("bulk: the server has no socket", "gradserve serve --bulk-listen auto, not off"),
    ("does not lead to", "gradserve serve --bulk-listen 0.0.0.0:PORT"),
    (
        "no connection to unix:",
        "between containers, a volume with the folder of that socket; the same user as the server",
    ),
    ("no connection to", "let the port of the bulk socket through firewalls: gradserve serve --bulk-listen HOST:PORT"),
)
"""Parts of reasons why no faster way is in use, and their cures. Other reasons, as another machine, have none."""


def check_transport(subject: Subject) -> Iterator[Observation]:
    """Names the way that tensors take, and why not a faster one."""
    found = subject.client.server_info().transport
    text = f"tensors travel by {found.way}" + (f"; {found.why_not_faster}" if found.why_not_faster else "")
    cures = (cure for part, cure in _TRANSPORT_CURES if part in found.why_not_faster)
    cure = "" if found.way == "shared_memory" else next(cures, "")  # nothing is faster
    yield warning(text, cure) if cure else ok(text)


_UPLOAD_BYTES = 4 << 20
_CALLS = 9
_FAR_SECONDS = 0.1
_SLOW_BYTES_PER_SECOND = 10e6


def check_speed(subject: Subject) -> Iterator[Observation]:
    """Measures a few calls and one upload."""
    import numpy as np

    import gradserve

    client, times = subject.client, []
    for _ in range(_CALLS):
        began = time.perf_counter()
        client.server_info()
        times.append(time.perf_counter() - began)
    value = client.empty(_UPLOAD_BYTES // 4, np.float32)
    value.fill(1.0)
    began = time.perf_counter()
    try:
        handle = client.put(value)
    except gradserve.ResourceExhaustedError as error:
        yield problem(f"no room for {size(_UPLOAD_BYTES)}: {error}", _MORE_BYTES)
        return
    seconds = time.perf_counter() - began
    client.delete(handle)
    latency, rate = statistics.median(times), _UPLOAD_BYTES / seconds
    text = f"a call takes {duration(latency)}, {size(_UPLOAD_BYTES)} arrive in {duration(seconds)}, {size(rate)}/s"
    if latency > _FAR_SECONDS or rate < _SLOW_BYTES_PER_SECOND:
        yield warning(
            text,
            f"{subject.on_server('bench')} measures each way; a server that is nearer, a local "
            "aggregator (GRADSERVE_LOCAL_AGGREGATOR) or a codec (gradserve.codecs) send less",
        )
    else:
        yield ok(text)


_CLOCK_SECONDS = 5.0
"""The difference of clocks from which on certificates, logs and records of rounds mislead."""


def check_clock(subject: Subject) -> Iterator[Observation]:
    """Compares the clocks of both machines."""
    found = []
    for _ in range(_CALLS):
        began = time.time()
        said = subject.client.server_info().time
        ended = time.time()
        if not said:
            yield ok("the server is too old to tell what its clock says")
            return
        found.append((ended - began, said - (began + ended) / 2))
    took, ahead = min(found)  # the quicker a call, the surer it is when the server answered
    where = "ahead" if ahead > 0 else "behind"
    text = f"the server's clock is {duration(abs(ahead))} {where}, give or take {duration(took / 2)}"
    if abs(ahead) - took / 2 > _CLOCK_SECONDS:
        yield warning(text, "timedatectl set-ntp true, on the machine whose clock is wrong")
    else:
        yield ok(text)


_LITTLE_DISK = 0.1
"""The part of a disk that should stay free."""


def check_disk(subject: Subject) -> Iterator[Observation]:
    """Looks at the room for the state of the server."""
    found = subject.info.state_disk
    if not found:
        yield ok("the server keeps nothing on a disk: what it has ends with it (gradserve serve --state-dir)")
    elif found["free_bytes"] < _LITTLE_DISK * found["total_bytes"]:
        yield warning(
            f"state directory: {disk_text(subject.info)}; when it is full, gradients and rounds are refused",
            "delete what is beside it, use a larger volume, or gradserve rm accumulators and parameters nobody needs",
        )
    else:
        yield ok(f"state directory: {disk_text(subject.info)}")


_NEAR = 0.9
"""The fraction of a limit from which on it is near."""
_MORE_BYTES = "gradserve ls tensors shows what is kept, gradserve rm deletes; gradserve serve --max-bytes"
_MEMORY_CURES = {
    "all tensors": _MORE_BYTES,
    "bookkeeping": "delete accumulators that nobody needs with gradserve rm; gradserve serve --max-bytes",
    "clients' shared memory": "gradserve serve --max-region-bytes",
    "device: all": "gradserve serve --max-device-bytes",
}
_COUNT_CURES = {
    "handles": "gradserve ls tensors shows who forgets to delete; gradserve serve --max-handles",
    "accumulators": "gradserve ls, gradserve rm accumulator NAME; gradserve serve --max-accumulators",
    "layers": "gradserve ls layers, gradserve rm layer NAME; gradserve serve --max-layers",
    "waiters": "gradserve top shows for whom calls wait; gradserve serve --max-waiters",
}


def _count(number: float) -> str:
    return f"{number:,.0f}"


def check_memory(subject: Subject) -> Iterator[Observation]:
    """Compares what is in use with the limits."""
    limits, usage = subject.info.limits, subject.info.usage
    figures: list[tuple[str, float, float, Callable[[float], str], str]] = [
        (each.purpose, each.num_bytes, each.max_bytes, size, _MEMORY_CURES.get(each.purpose, _MORE_BYTES))
        for each in subject.status.memory
    ]
    figures += [
        (what, usage.get(f"num_{what}", 0), limits.get(f"max_{what}", 0), _count, cure)
        for what, cure in _COUNT_CURES.items()
    ]
    near = [each for each in figures if each[2] and each[1] >= _NEAR * each[2]]
    for what, used, limit, shown, cure in near:
        yield warning(f"{what}: {shown(used)} of {shown(limit)} in use", cure)
    if not near:
        fractions = [f"{what} {used / limit:.0%}" for what, used, limit, _, _ in figures if limit]
        yield ok(f"in use of their limits: {', '.join(fractions)}")


_LONG_SECONDS = 60.0
_MOST_LINES = 5


def check_training(subject: Subject) -> Iterator[Observation]:
    """Looks for rounds that wait long, late gradients, weights that differ, and calls that were refused."""
    status, found = subject.status, list[Observation]()
    for accumulator in status.accumulators:
        found += _waiting(subject, "accumulator", accumulator, accumulator.num_accumulated)
        if accumulator.different:
            who = _some(sorted(accumulator.different))
            found.append(
                problem(
                    f"accumulator {accumulator.name}: weights differ from those of most at {who}",
                    "start these workers again: they take over the state of the others; "
                    f"{_show(subject, 'accumulator', accumulator)}",
                )
            )
    for parameters in status.parameters:
        found += _waiting(subject, "parameters", parameters, parameters.num_updates)
    for error in status.errors:
        if error.code == "PERMISSION_DENIED" and not error.method.endswith(".DeleteAccumulator"):  # as of this command
            role = "worker" if "needs the role worker" in error.message else "chief"
            found.append(warning(f"refused, {error.count} in all: {error.message}", _role(subject, role)))
    yield from found[:_MOST_LINES]
    if len(found) > _MOST_LINES:
        yield warning(f"{len(found) - _MOST_LINES} more like these", subject.on_server("top"))
    if not found:
        yield ok(
            f"{status.num_accumulators} accumulators and {status.num_parameters} parameters, none of which waits long"
        )


def _waiting(
    subject: Subject, kind: str, thing: "AccumulatorStatus | ParametersStatus", num_arrived: int
) -> Iterator[Observation]:
    """Yields what is wrong with the rounds of an accumulator or of parameters."""
    show, uptime = _show(subject, kind, thing), subject.status.uptime
    began = next((each.began for each in reversed(thing.rounds) if not each.ended), uptime)
    if thing.num_waiting and num_arrived < thing.num_required and uptime - began > _LONG_SECONDS:
        missing = f"; missing: {_some(thing.missing)}" if thing.missing else ""
        yield warning(
            f"{kind} {thing.name}: {num_arrived} of {thing.num_required} for {duration(uptime - began)}{missing}",
            f"{show}; start the missing workers, or require fewer (num_required)",
        )
    if thing.stale > thing.accepted:
        yield warning(
            f"{kind} {thing.name}: {thing.stale} of {thing.stale + thing.accepted} came too late",
            f"{show} names the slow workers; all have to go on at the step of the newest average",
        )


def _show(subject: Subject, kind: str, thing: "AccumulatorStatus | ParametersStatus") -> str:
    return subject.on_server(shlex.join(["show", kind, thing.name, "--container", thing.container]))


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_LINES} more" if len(names) > _MOST_LINES else ""
    return ", ".join(names[:_MOST_LINES]) + more
