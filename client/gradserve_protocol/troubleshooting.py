"""The entries of troubleshooting: for each code of an error, what it means and what to do.

Errors of the client end with their code: `no accumulator 'default/x' [GS_NO_SUCH_NAME]`. Each class of errors has a
code, and errors that need a different remedy than others of their class have one of their own, which the server sends
beside the message. Codes are stable: they are never renamed, and never get another meaning.

`gradserve explain` prints entries, and docs/error_codes.md has them as a table, which `make tables` writes.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher

DOMAIN = "gradserve"
"""The domain of the google.rpc.ErrorInfo with which a server sends a code; its reason is the code."""
_CODE = re.compile(r"GS_[A-Z0-9_]{1,60}")
_WORDS_WITH_CODE = re.compile(r"\bGS_[A-Z0-9_]{1,60}\b", re.IGNORECASE)
_LEAST_LIKENESS = 0.6
_OF_BEGINNINGS = 0.95
"""The weight of the likeness of a beginning, which is less than that of the whole text."""


@dataclass(frozen=True)
class Entry:
    """An explanation of an error: its meaning and its cure.

    Attributes:
        code: Its code.
        error: The name of its class.
        means: What has happened.
        cure: What to do. Like `means`, a phrase that may have Markdown's backquotes, but no links.
        commands: The commands to run next. NAME stands for the resource, KIND for "accumulator" or "parameters",
            ADDRESS for the server.
        page: The page that says more: its path in the documentation, perhaps with an anchor. Empty for none.
        says: A part of its message, to recognize it in a log; empty for none.
    """

    code: str
    error: str
    means: str
    cure: str
    commands: tuple[str, ...] = ()
    page: str = ""
    says: str = ""


_DOCTOR = "gradserve doctor ADDRESS"
_SHOW = "gradserve show KIND NAME --address ADDRESS"
_INFO = "gradserve info ADDRESS"

ENTRIES = (
    Entry(
        "GS_STALE",
        "StaleGradientError",
        "the gradient was computed at an earlier step than the server's: its round has ended without it",
        "use the newest average that the error carries, and go on at `error.global_step`; `gradserve.torch` and "
        "`gradserve.jax` do this by themselves",
        (_SHOW,),
        "pytorch.md",
    ),
    Entry(
        "GS_INVALID_ARGUMENT",
        "InvalidArgumentError",
        "an argument is not valid, so the call can never succeed as it is",
        "the message says what was given and what was expected, `error.field` names the argument: correct the call",
    ),
    Entry(
        "GS_SHAPE_MISMATCH",
        "InvalidArgumentError",
        "the gradient or update does not fit the accumulator or the parameters",
        "the message names the component, what came and what was expected: all workers need the same model",
        (_SHOW,),
        says="Shape mismatch",
    ),
    Entry(
        "GS_WRONG_SERVER",
        "InvalidArgumentError",
        "the client's list of servers is not that of their cluster, or the call reached another server of it",
        "give the client all servers of the cluster, in the order of their `--cluster-index`",
        (_INFO,),
        "many_servers.md",
    ),
    Entry(
        "GS_TLS_FILE",
        "InvalidArgumentError",
        "a file with certificates or a key cannot be read, is damaged, or does not fit the others",
        "correct `tls=gradserve.TLS(...)`, or the `GRADSERVE_TLS...` variable; the message names the file",
        (_DOCTOR,),
        "certificates.md",
    ),
    Entry(
        "GS_NOT_FOUND",
        "NotFoundError",
        "what the call names does not exist on the server",
        "the message says what it is; list what is there",
        ("gradserve ls --address ADDRESS",),
    ),
    Entry(
        "GS_NO_SUCH_NAME",
        "NotFoundError",
        "the accumulator, layer or parameters were never made, were deleted, or the server was started again without a "
        "state directory",
        "workers that come and go begin again from a checkpoint; with `--state-dir` accumulators survive a restart",
        ("gradserve ls --address ADDRESS",),
        "elastic.md",
        "no accumulator",
    ),
    Entry(
        "GS_NO_PARAMETERS",
        "NotFoundError",
        "there are no parameters of this name, and the call has no values to create them with",
        "create them with `client.parameters(values, ...)`, or call again once another client has created them",
        ("gradserve ls parameters --address ADDRESS",),
        "parameters.md",
        "there are no parameters",
    ),
    Entry(
        "GS_REPLACED",
        "NotFoundError",
        "what the client had opened was deleted, and another one has its name now",
        "open it again, with the call that made the object; a training run begins again from its checkpoint",
        (_SHOW,),
        "elastic.md",
        "another one has this name now",
    ),
    Entry(
        "GS_NO_TENSOR",
        "NotFoundError",
        "no tensor has this handle: it was deleted, its lease has ended, or the server was started again",
        "upload the tensor again, and keep it with a longer lease if it expired",
        ("gradserve ls tensors --address ADDRESS",),
        says="no tensor with the handle",
    ),
    Entry(
        "GS_NO_FORWARD",
        "NotFoundError",
        "the layer does not keep this forward: it is unknown, its lease has ended, or the server was started again",
        "run the forward pass again, and compute its gradients once",
        ("gradserve show layer NAME --address ADDRESS",),
        says="no forward",
    ),
    Entry(
        "GS_NO_CLUSTER",
        "NotFoundError",
        "the client asks another Ray than the one on which the cluster runs, or has not Ray's token",
        "set `RAY_ADDRESS`, and `RAY_AUTH_MODE` and Ray's token if it has one",
        ("gradserve cluster status",),
        "howto/ray.md#which-ray",
        "no cluster NAME on this Ray",
    ),
    Entry(
        "GS_ALREADY_EXISTS",
        "AlreadyExistsError",
        "the name is taken by something else",
        "take another name, or delete what has this one",
        (_SHOW,),
    ),
    Entry(
        "GS_OTHER_SPEC",
        "AlreadyExistsError",
        "a worker asks for an accumulator, parameters or a layer of this name with other shapes, dtypes or options",
        "start all workers with the same model; delete what an earlier run has left",
        (_SHOW, "gradserve rm KIND NAME --address ADDRESS"),
        says="exists with another spec",
    ),
    Entry(
        "GS_OTHER_LIFETIME",
        "AlreadyExistsError",
        "it exists with another lease, or is shared where the call wants it private, or the other way round",
        "use the same `idle_lease` and `shared_name` in all workers, or delete what an earlier run has left",
        (_SHOW, "gradserve rm KIND NAME --address ADDRESS"),
        says="exists with another lifetime",
    ),
    Entry(
        "GS_PRIVATE_NAME",
        "AlreadyExistsError",
        "the name belongs to something that is private to another client or user",
        "take another name, or another container; private things go when their client closes",
        says="exists, private to somebody else",
    ),
    Entry(
        "GS_WORKERS_DIFFER",
        "AlreadyExistsError",
        "this worker has other settings, another model or other data than the workers of its training run",
        "start all workers of a run with the same script and settings, or give the run another name",
        (_SHOW,),
        "howto/find_a_bad_worker.md",
    ),
    Entry(
        "GS_RUN_EXISTS",
        "AlreadyExistsError",
        "a training run of this name has begun already, and this worker would start it anew",
        'join it with `if_exists="join"`, start over with `if_exists="new"` or another name, or pass `start_step`',
        (_SHOW,),
        "howto/resume.md",
    ),
    Entry(
        "GS_ABORTED",
        "AbortedError",
        "the state that the call depended on is gone",
        "the message says what is gone; look at what is there, and begin again from there",
        (_SHOW,),
    ),
    Entry(
        "GS_DELETED",
        "AbortedError",
        "the accumulator, layer or parameters were deleted while the call used them, or their lease has ended",
        "if another run deleted it, take another name; otherwise begin again from a checkpoint",
        ("gradserve ls --address ADDRESS",),
        "elastic.md",
        "was deleted",
    ),
    Entry(
        "GS_RESTARTED",
        "AbortedError",
        "the server was started again since the client opened the accumulator or the parameters",
        "clients open it again by themselves; if the error stays, make the object again",
        (_INFO,),
        "concepts/restarts.md",
        "the server was started again since",
    ),
    Entry(
        "GS_SEVERAL_SERVERS",
        "AbortedError",
        "calls reach several servers in turn, as behind a load balancer. Each refuses what is for another one, as a "
        "server does that was started again",
        "all calls of a client have to reach one server: connect to it, or to all servers of a cluster by the list of "
        "their addresses",
        (_INFO,),
        "many_servers.md",
        "leads to different servers",
    ),
    Entry(
        "GS_CLOCK_SET_BACK",
        "AbortedError",
        "the clock of the home of a sharded accumulator was set back, and it has no state directory",
        "delete the accumulator and create it again",
        ("gradserve rm KIND NAME --address ADDRESS",),
        "concepts/sharding.md#sharded-accumulators",
        "that was deleted, as this server knows a later one",
    ),
    Entry(
        "GS_REQUEST_FORGOTTEN",
        "AbortedError",
        "the call was repeated so late that the server no longer remembers its request id, or keeps its average",
        "do not repeat it: go on at the accumulator's step; servers remember `--id-window` calls of each client",
        (_SHOW,),
        "repeated_calls.md",
        "latest that are remembered",
    ),
    Entry(
        "GS_SHARD_LOST",
        "AbortedError",
        "a server of the cluster was started again and has lost its part of gradients that their home has counted",
        "go on with the next round, with the step that the message names; with `--state-dir` servers keep their part",
        (_INFO,),
        "concepts/sharding.md#sharded-accumulators",
    ),
    Entry(
        "GS_NOT_FINITE",
        "InvalidArgumentError",
        "a gradient or an update has infinite values or NaN, which `refuse_non_finite` keeps out",
        "leave this step out, or lower the learning rate; look for the batch that makes them: the message names the "
        "first value",
        (_SHOW,),
        "parameters.md",
    ),
    Entry(
        "GS_WEIGHTS_DIFFER",
        "AbortedError",
        "the weights of this worker are not those of most workers of its run",
        "start it again, so that it takes over the state of the others; look for what else changes its weights",
        (_SHOW,),
        "howto/find_a_bad_worker.md",
        "has other parameters than most",
    ),
    Entry(
        "GS_RUN_SET_BACK",
        "AbortedError",
        "the training run is at an earlier step than this worker: its accumulator was set back",
        "start all workers of the run again, from one checkpoint with `start_step`",
        (_SHOW,),
        "howto/resume.md",
    ),
    Entry(
        "GS_VALUES_LOADED",
        "AbortedError",
        "other values were loaded into the parameters while the call waited",
        "read the newest version, and compute the update anew",
        (_SHOW,),
        "parameters.md",
    ),
    Entry(
        "GS_HOOK_BROKEN",
        "AbortedError",
        "a backward pass was interrupted, so some gradients of the model were averaged and others were not",
        "give the model the weights of another worker, and make another hook",
        page="howto/ddp.md",
    ),
    Entry(
        "GS_LOST",
        "LostError",
        "the server was started again, and gradients that a client had applied are gone",
        "the message names them; begin the round again. With `--state-dir` rounds survive a restart",
        (_SHOW,),
        "concepts/restarts.md",
    ),
    Entry(
        "GS_NOT_DURABLE",
        "NotDurableError",
        "the client was closed before all gradients that it had sent were in rounds that a crash cannot undo",
        "wait for the round before closing the client, or accept that they may be lost",
        page="concepts/restarts.md",
    ),
    Entry(
        "GS_OUT_OF_RANGE",
        "OutOfRangeError",
        "the step is not available: it has not come, is no longer kept, or was skipped",
        "the message says which steps there are",
        (_SHOW,),
    ),
    Entry(
        "GS_STEP_NOT_KEPT",
        "OutOfRangeError",
        "the average, version or record of this step is no longer kept",
        "read a step that is kept; keep more of them with `keep_averages`, `keep_versions` or `keep_rounds`",
        (_SHOW,),
        "howto/resume.md",
    ),
    Entry(
        "GS_DEADLINE",
        "DeadlineExceededError",
        "the call reached its time limit before the server had answered",
        "repeat it with the `request_id` of the error, so that it counts once; give a longer `timeout` if calls "
        "are slow",
        (_DOCTOR,),
    ),
    Entry(
        "GS_ROUND_INCOMPLETE",
        "DeadlineExceededError",
        "the round has not ended in time; the message names who is in and who is missing",
        "nothing is lost: the gradient stays in the round, and the same call may be made again. Start the missing "
        "workers, or require fewer with `num_required`",
        (_SHOW,),
        says="did not get the N gradients required within",
    ),
    Entry(
        "GS_CHECKPOINT_TOO_OLD",
        "DeadlineExceededError",
        "a worker goes on from a checkpoint that is older than the kept averages, and no other worker has a newer "
        "state",
        "the message names the steps: take a newer checkpoint, or delete the accumulator and repeat the steps. Save "
        "more often, or keep more averages",
        (_SHOW,),
        "howto/resume.md",
        "the server keeps averages only from step N on",
    ),
    Entry(
        "GS_NO_CREATOR",
        "DeadlineExceededError",
        "another client was about to create the parameters, and has not done so in time",
        "make the same call again: this client creates them then",
        ("gradserve ls parameters --address ADDRESS",),
        says="was about to create parameters",
    ),
    Entry(
        "GS_SERVERS_NOT_UP",
        "DeadlineExceededError",
        "servers on Ray have not started within the client's timeout",
        "see what they are doing, and why they ended",
        ("gradserve cluster status",),
        "howto/ray.md",
        "servers of cluster NAME are not up yet",
    ),
    Entry(
        "GS_LIMIT",
        "ResourceExhaustedError",
        "a limit of the server was reached",
        "the message names it; wait for `error.retry_after` if it is set, or raise the limit",
        (_INFO,),
        "configuration.md",
    ),
    Entry(
        "GS_MEMORY",
        "ResourceExhaustedError",
        "the server's memory for this purpose is in use: `--max-bytes`, or the limit that the message names",
        "find tensors that nobody deletes; raise the limit, or give tensors a shorter lease",
        ("gradserve ls tensors --address ADDRESS", _INFO),
        "configuration.md",
        "too many bytes of tensor memory",
    ),
    Entry(
        "GS_TOO_MANY",
        "ResourceExhaustedError",
        "the server holds as many accumulators, layers, handles or connections as it may",
        "delete what is not needed, or raise the limit that the message names",
        (_INFO,),
        "configuration.md",
        "too many accumulators",
    ),
    Entry(
        "GS_WAITING_CALLS",
        "ResourceExhaustedError",
        "as many calls wait for rounds as the server allows",
        "end rounds: start missing workers, or require fewer. Many workers need a higher `--max-waiters`",
        ("gradserve top ADDRESS",),
        "configuration.md",
        "too many waiting calls",
    ),
    Entry(
        "GS_TOO_MANY_CALLS",
        "ResourceExhaustedError",
        "a client has as many calls or unread replies under way as the server allows",
        "make fewer calls at the same time, and read their replies; clients of many threads connect several times",
        (_INFO,),
        "configuration.md",
        "too many calls",
    ),
    Entry(
        "GS_QUOTA",
        "ResourceExhaustedError",
        "this identity or container uses as much as it may, or the rest is reserved for others",
        "delete what is not needed, or raise the quota in the access file",
        (_INFO,),
        "fair_shares.md",
    ),
    Entry(
        "GS_RATE",
        "ResourceExhaustedError",
        "this identity makes more calls in a second than the access file allows",
        "clients wait and try again within the call's time limit; raise the rate in the access file",
        (_INFO,),
        "fair_shares.md",
    ),
    Entry(
        "GS_NO_MEMORY",
        "ResourceExhaustedError",
        "the server's machine or device has no memory left, although its limits allow more",
        "lower `--max-bytes` to what the machine has, or use a larger one",
        (_INFO,),
        "configuration.md",
        "the server has no memory left",
    ),
    Entry(
        "GS_DEVICE_MEMORY",
        "ResourceExhaustedError",
        "what is in use does not fit into the memory of the server's device",
        "raise `--max-device-bytes`, or delete tensors and accumulators that are on the device",
        (_INFO,),
        "device_memory.md",
        "the memory of the device does not suffice",
    ),
    Entry(
        "GS_DISK_FULL",
        "ResourceExhaustedError",
        "there is no space in the server's state directory",
        "free space on its disk; the server goes on as soon as there is some",
        (_INFO,),
        "durability.md#when-the-disk-fails",
        "there is no space in the state directory",
    ),
    Entry(
        "GS_TOO_LARGE",
        "ResourceExhaustedError",
        "a message, or a result that should come in a message, is larger than the server sends or takes",
        "keep results on the server (`keep=True`) and read them as streams, or raise `--max-message-bytes`",
        (_INFO,),
        "configuration.md",
    ),
    Entry(
        "GS_ROUNDS_HELD",
        "ResourceExhaustedError",
        "the cluster is about to change its number of servers, and holds new rounds until then",
        "clients send the gradient again by themselves; wait until the change is over",
        ("gradserve cluster status",),
        "howto/resize_on_ray.md",
    ),
    Entry(
        "GS_UNAVAILABLE",
        "UnavailableError",
        "the server cannot be reached, or has ended the connection",
        "clients try again by themselves for 15 s within the call's time (`GRADSERVE_RESTART_PATIENCE`), also before "
        "the first answer; workers of a training run do so for as long as their `timeout`. The error says what has "
        "limited it",
        (_DOCTOR,),
    ),
    Entry(
        "GS_NO_CONNECTION",
        "UnavailableError",
        "nothing answers at the address",
        "start the server, or correct the address, the port, the proxy or the firewall",
        ("gradserve health ADDRESS", _DOCTOR),
        says="no connection",
    ),
    Entry(
        "GS_CONNECTION_LOST",
        "UnavailableError",
        "the connection broke during the call, and the call could not be repeated in time",
        "repeat it with the `request_id` of the error, so that it counts once; look for restarts of the server and at "
        "the network",
        (_DOCTOR,),
    ),
    Entry(
        "GS_SHUTTING_DOWN",
        "UnavailableError",
        "the server is shutting down",
        "start it again: clients go on by themselves",
        ("gradserve health ADDRESS",),
        "durability.md",
        "the server is shutting down",
    ),
    Entry(
        "GS_TLS",
        "UnavailableError",
        "client and server do not agree about TLS: only one of them encrypts, or a certificate is not accepted",
        "the message says which; give both the certificates of one authority",
        (_DOCTOR,),
        "security.md",
    ),
    Entry(
        "GS_DNS",
        "UnavailableError",
        "the name in the address cannot be looked up",
        "correct the name, or the records of DNS",
        (_DOCTOR,),
        "many_servers.md",
    ),
    Entry(
        "GS_RAY",
        "UnavailableError",
        "the client asks another Ray than the one on which the cluster runs, or has not Ray's token",
        "set `RAY_ADDRESS`, and `RAY_AUTH_MODE` and Ray's token if it has one",
        ("gradserve cluster status",),
        "howto/ray.md#which-ray",
        "cannot connect to Ray",
    ),
    Entry(
        "GS_TRANSPORT",
        "UnavailableError",
        "the transport that was asked for is not possible here",
        "the message says why; leave out `transport=` and `GRADSERVE_TRANSPORT`, and the fastest possible one is used",
        (_INFO,),
        "howto/transport.md",
        "transport='...' is not possible",
    ),
    Entry(
        "GS_LOCAL_AGGREGATOR",
        "UnavailableError",
        "the aggregator that the workers of this host share did not start, or has no folder of its own",
        "read its log, which the message names; or connect without `local_aggregator`",
        (_DOCTOR,),
        "howto/trees.md",
    ),
    Entry(
        "GS_STATE_FAILED",
        "UnavailableError",
        "the server cannot write its state directory, and stops rather than forget what it has confirmed",
        "its log has the reason: repair the disk, then start it again",
        ("gradserve state check DIRECTORY",),
        "state_directory.md",
        "the server stops",
    ),
    Entry(
        "GS_UNAUTHENTICATED",
        "UnauthenticatedError",
        "the server has an access file, and does not accept the caller's credentials",
        "set `GRADSERVE_TOKEN`, or pass `connect(..., token=)`",
        (_DOCTOR,),
        "security.md#tokens-and-roles",
    ),
    Entry(
        "GS_NO_CREDENTIALS",
        "UnauthenticatedError",
        "the server has an access file, and the call showed no token",
        "set `GRADSERVE_TOKEN`, or pass `connect(..., token=)`",
        (_DOCTOR,),
        "security.md#tokens-and-roles",
        "this server needs credentials",
    ),
    Entry(
        "GS_UNKNOWN_CREDENTIALS",
        "UnauthenticatedError",
        "the server's access file does not have this token, certificate or user",
        "take the token that the administrator has issued for this server, or have it entered in the access file",
        (_DOCTOR,),
        "access.md#credentials",
        "the server does not know this token",
    ),
    Entry(
        "GS_PERMISSION_DENIED",
        "PermissionDeniedError",
        "these credentials do not allow the call",
        "use other credentials, or change the access file",
        (_DOCTOR,),
        "access.md",
    ),
    Entry(
        "GS_ROLE",
        "PermissionDeniedError",
        "the identity's role is too low in this container",
        "the message names the role that is needed: enter it in the access file, or use another container",
        (_DOCTOR,),
        "access.md",
        "needs the role",
    ),
    Entry(
        "GS_UPSTREAM_CREDENTIALS",
        "PermissionDeniedError",
        "the server upstream refuses the token or certificate of the aggregator, not that of the caller",
        "give the aggregator credentials that the server upstream knows",
        (_INFO,),
        "howto/trees.md",
    ),
    Entry(
        "GS_UNIMPLEMENTED",
        "UnimplementedError",
        "the server does not know the call: it is older than this client, or is not configured for it",
        "use the same version on both sides; upgrade servers before clients",
        (_INFO,),
    ),
    Entry(
        "GS_CANCELLED",
        "CallCancelledError",
        "the client was closed during the call, or an operation that ran together with it has failed",
        "close the client after its last call; the error of the other operation is the cause",
    ),
    Entry(
        "GS_INTERNAL",
        "InternalError",
        "a fault of the server, or of a library that it uses",
        "look for the id of the message in the server's log, and report the traceback",
        page="logs.md",
        says="internal error; the server's log has the details under ID",
    ),
    Entry(
        "GS_FORKED",
        "ForkedClientError",
        "the client was connected before this process was forked",
        'connect after forking, or start workers with the "spawn" method of multiprocessing',
    ),
    Entry(
        "GS_ERROR",
        "GradserveError",
        "an error that belongs to no other class",
        "the message says what has happened",
    ),
)
"""All entries, those of a class together."""

BY_CODE: Mapping[str, Entry] = {each.code: each for each in ENTRIES}
"""The entries by their codes."""


def is_code(text: str) -> bool:
    """Returns True if a text has the form of a code, known or not."""
    return _CODE.fullmatch(text) is not None


def code_in(text: str) -> str | None:
    """Returns the code in a text: the last word of that form, in capitals; None if there is none."""
    found = _WORDS_WITH_CODE.findall(text)
    return found[-1].upper() if found else None


def entries_of(error: str) -> tuple[Entry, ...]:
    """Returns the entries of a class of errors, given its name, that of the class itself first."""
    return tuple(each for each in ENTRIES if each.error == error)


def nearest(text: str, count: int = 3) -> tuple[str, ...]:
    """Returns the codes that are most like a text or its beginning, the nearest first."""
    wanted = re.sub(r"\W", "_", text.upper()).removeprefix("GS_")
    likeness = {code: _likeness(wanted, code.removeprefix("GS_")) for code in BY_CODE}
    alike = [code for code in likeness if likeness[code] >= _LEAST_LIKENESS]
    return tuple(sorted(alike, key=lambda code: -likeness[code])[:count])


def _likeness(wanted: str, name: str) -> float:
    """Returns 1 for the same text, 0 for one without a common letter."""
    whole = SequenceMatcher(None, wanted, name).ratio()
    return max(whole, SequenceMatcher(None, wanted[: len(name)], name).ratio() * _OF_BEGINNINGS)
