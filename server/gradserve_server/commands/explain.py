"""`gradserve explain`: what an error means, what a server knows of a name or of a request, and the next command."""

import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from gradserve_protocol import troubleshooting
from gradserve_protocol.troubleshooting import BY_CODE, Entry
from gradserve_server.commands.resources import container_option
from gradserve_server.commands.servers import (
    LAYERS,
    PARAMETERS,
    TENSORS,
    Answer,
    address_option,
    ask_all,
    connection_options,
    on_server,
    one_of,
)
from gradserve_server.commands.wording import ExitCode, duration, echo_json, json_option, size, some, tell, tell_problem
from gradserve_server.config.settings import SettingsError

if TYPE_CHECKING:
    import gradserve
    from gradserve_protocol.server_status import AccumulatorStatus, ErrorStatus, ParametersStatus, RequestStatus

_ERROR_CLASS = re.compile(r"\b[A-Z][A-Za-z]*Error\b")
_NAMED = re.compile(r"\b(accumulator|layer|parameters|run) '([^']+)'")
_REQUEST = re.compile(r"\brequest_id=(\d+)|\b([0-9a-f]{32}):(\d+)\b")
_PLACEHOLDERS = frozenset({"KIND", "NAME", "DIRECTORY"})
_SEQUENCE_BITS = 64
_MOST_THINGS = 1000
_MOST_SHOWN = 5
_MOST_ERRORS = 3
_OUTCOMES = {
    "accepted": "what it brought is in the open round",
    "stale": "what it brought came too late for its round, and was dropped",
    "already_counted": "its worker was in the round already, so what it brought was dropped",
    "dropped": "what it brought was accepted, and its round has ended without it",
    "done": "it was carried out",
    "waiting": "it waits for gradients",
    "forgotten": "it may have been carried out, and is older than the calls that are remembered of its client",
}
_ENDED = {
    "accepted": "what it brought counts in the round that led to step {step}",
    "already_counted": "its worker was in the round that led to step {step} already, so what it brought was dropped",
    "done": "it was carried out, in the round that led to step {step}",
}
"""The outcomes of `RequestStatus` in words: in general, and of a round that has ended."""


@dataclass(frozen=True)
class _Question:
    """The argument of the command, as it is understood.

    Attributes:
        text: The argument.
        entry: The entry of the error that it is; None if it is no error.
        request_id: The id of the request that it is or names; None without one.
        name: The name that it is or names, perhaps with a container before it; empty for none.
        kind: The kind of what the error names; empty if it is not known.
    """

    text: str
    entry: Entry | None = None
    request_id: int | None = None
    name: str = ""
    kind: str = ""

    @classmethod
    def of(cls, text: str) -> "_Question":
        """Understands an argument.

        Raises:
            click.UsageError: It is a code that does not exist.
        """
        entry = _entry_in(text)
        if entry is not None:
            named = _NAMED.search(text)
            kind, name = named.groups() if named else ("", "")
            return cls(text, entry, _request_in(text), name, "accumulator" if kind == "run" else kind)
        if text.isdecimal() and int(text) >> _SEQUENCE_BITS:
            return cls(text, request_id=int(text))
        return cls(text, request_id=_request_in(text), name="" if _request_in(text) else text)

    def is_named(self, container: str, name: str) -> bool:
        """Returns True if it names what has this container and name."""
        return self.name in (name, f"{container}/{name}")


def _entry_in(text: str) -> Entry | None:
    """Returns the entry of a code, of the name of a class of errors, or of a line that has one of these in it."""
    if code := troubleshooting.code_in(text):
        if code not in BY_CODE:
            raise click.UsageError(f"no error has the code {code}{_nearest(code)}")
        return BY_CODE[code]
    for name in _ERROR_CLASS.findall(text):
        if entries := troubleshooting.entries_of(name):
            # Clients of earlier versions print no codes.
            return next((each for each in entries if each.says and each.says in text), entries[0])
    return None


def _request_in(text: str) -> int | None:
    found = _REQUEST.search(text)
    if found is None:
        return None
    return int(found[1]) if found[1] else int(found[2], 16) << _SEQUENCE_BITS | int(found[3])


def _nearest(text: str) -> str:
    found = troubleshooting.nearest(text)
    return f"; the nearest codes: {', '.join(found)}" if found else ""


@dataclass(frozen=True)
class _Thing:
    """Something on a server that has the name.

    Attributes:
        kind: "accumulator", "parameters", "layer" or "tensor".
        container: Its container; empty for a tensor.
        name: Its name, or its handle.
        state: Its status, or what lists say of it.
        idle_lease: Seconds without use after which it is deleted; None: never, or not known.
    """

    kind: str
    container: str
    name: str
    state: Any
    idle_lease: float | None = None


@dataclass(frozen=True)
class _Found:
    """A server's knowledge of what was asked.

    Attributes:
        things: What has the name.
        similar: Other names that contain it.
        requests: What is known of the request.
        errors: The latest errors of the kind, or about the name; only admins see these.
        uptime: Seconds since the server started.
    """

    things: Sequence[_Thing] = ()
    similar: Sequence[str] = ()
    requests: "Sequence[RequestStatus]" = ()
    errors: "Sequence[ErrorStatus]" = ()
    uptime: float = 0.0


def _ask(client: "gradserve.Client", question: _Question, container: str) -> _Found:
    from gradserve_protocol import errors

    status = client.server_status(
        container=container,
        name_contains=question.name,
        order="name",
        max_accumulators=_MOST_THINGS if question.name else 1,
        max_rounds=1,
        max_workers=1,
        request_id=question.request_id,
    )
    things, similar = list[_Thing](), list[str]()
    if question.name:
        named = (("accumulator", status.accumulators), (PARAMETERS, status.parameters), ("layer", status.layers))
        for kind, each in ((kind, each) for kind, found in named for each in found):
            if question.is_named(each.container, each.name):
                things.append(_Thing(kind, each.container, each.name, each, _lease(client, kind, each)))
            else:
                similar.append(f"{each.container}/{each.name}")
        if question.entry is None:
            tensors = [each for each in client.list_tensors() if each.handle == question.name]
            things += [_Thing("tensor", "", each.handle, each) for each in tensors]
    statuses = {error.__name__: code for error, code in errors.CODE_NAMES.items()}
    code = statuses.get(question.entry.error, "") if question.entry else ""
    recent = [
        each
        for each in status.errors
        if (not question.entry or each.code == code) and (not question.name or question.name in each.message)
    ]
    shown = () if question.entry is None and not question.name else tuple(recent[:_MOST_ERRORS])
    return _Found(tuple(things[:_MOST_SHOWN]), tuple(similar), status.requests, shown, status.uptime)


def _lease(client: "gradserve.Client", kind: str, status: Any) -> float | None:
    if kind == "layer":
        return None
    lists = client.list_parameters if kind == PARAMETERS else client.list_accumulators
    return next((each.idle_lease for each in lists(status.container) if each.name == status.name), None)


@dataclass(frozen=True)
class _Explanation:
    """The output of the command.

    Attributes:
        question: The question.
        address: The server that was asked; empty if none was.
        answers: What the servers know.
        tls: The options that reach them.
    """

    question: _Question
    address: str
    answers: Sequence[Answer[_Found]] = ()
    tls: dict[str, Any] = field(default_factory=dict)

    @property
    def found(self) -> list[_Found]:
        return [each.value for each in self.answers if each.value is not None]

    @property
    def things(self) -> list[_Thing]:
        return [thing for each in self.found for thing in each.things]

    @property
    def requests(self) -> "list[RequestStatus]":
        """The places that know the request; those that may have forgotten it only if there is no other."""
        every = [request for each in self.found for request in each.requests]
        return [each for each in every if each.outcome != "forgotten"] or every

    @property
    def next_command(self) -> str:
        """The command to run next; empty if there is none."""
        entry, things, requests = self.question.entry, self.things, self.requests
        where = None
        if things or requests:
            first = (things or requests)[0]
            where = first.kind, first.container, first.name
        elif self.question.kind:
            where = self.question.kind, "", self.question.name.removeprefix("default/")
        commands: Iterable[str] = ()
        if entry is not None:
            commands = entry.commands
        elif where is not None:
            commands = ("gradserve show KIND NAME --address ADDRESS",)
        elif self.address:
            commands = ("gradserve ls ADDRESS" if self.found else "gradserve doctor ADDRESS",)
        filled = [self._filled(each, where) for each in commands]
        whole = [each for each in filled if _PLACEHOLDERS.isdisjoint(shlex.split(each))]
        return next(iter(whole or filled), "")

    def _filled(self, command: str, where: tuple[str, str, str] | None) -> str:
        """Returns a command of an entry with the name and the server, as far as they are known."""
        words = shlex.split(command)
        if where is not None and "NAME" in words:
            kind, container, name = where
            at = words.index("NAME")
            words[at : at + 1] = [name, *(["--container", container] if container not in ("", "default") else [])]
            words = [kind if each == "KIND" else each for each in words]
        if "ADDRESS" not in words:
            return shlex.join(words)
        words = [each for each in words if each not in ("ADDRESS", "--address")]
        return on_server(words, self.address, self.tls) if self.address else shlex.join(words)


class _Argument(click.ParamType[str]):
    """An error, a request id or a name. Shells complete codes."""

    name = "text"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Returns the codes that begin with what has been typed."""
        return [CompletionItem(code) for code in BY_CODE if incomplete and code.startswith(incomplete.upper())]


@click.command()
@click.argument("words", nargs=-1, required=True, type=_Argument(), metavar="ERROR|REQUEST_ID|NAME")
@container_option
@json_option
@address_option
@connection_options
def explain(words: Sequence[str], address: str, timeout: float, container: str, as_json: bool, **tls: Any) -> None:
    """Explain an error, a request or a name: what it means, what the server knows of it, and the next command.

    An ERROR is the code at the end of an error's message, such as GS_STALE; the name of its class; or the whole line. A
    REQUEST_ID is that of an error of the caller's own calls. A NAME is that of an accumulator, of parameters or of a
    layer, or the handle of a tensor.

    For an ERROR, a server is asked only if --address or GRADSERVE_ADDRESS names one.
    """
    context = click.get_current_context()
    question = _Question.of(" ".join(words))
    asks = question.entry is None or context.get_parameter_source("address") is not ParameterSource.DEFAULT
    problem, answers = "", tuple[Answer[_Found], ...]()
    if asks:
        try:
            answers = ask_all(address, timeout, lambda client: _ask(client, question, container), **tls)
        except SettingsError:
            raise
        except click.ClickException as error:
            problem = error.message
    explanation = _Explanation(question, address if asks else "", answers, tls)
    problems = [problem] if problem else []
    problems += [f"server {each.index} at {each.address}: {each.problem}" for each in answers if each.problem]
    if question.entry is None and explanation.found and not (explanation.things or explanation.requests):
        problems.append(_unknown(explanation))
    if as_json:
        echo_json(_described(explanation, problems))
    else:
        _show(explanation)
    for each in problems:
        tell_problem(each)
    if not as_json and explanation.next_command:
        tell(f"next: {explanation.next_command}")
    context.exit(ExitCode.FAILED if problems else ExitCode.DONE)


def _unknown(explanation: _Explanation) -> str:
    question = explanation.question
    if question.request_id is not None:
        return (
            f"no accumulator and no parameters on {explanation.address} know request {question.request_id}: it was not "
            "carried out, what it was for is gone, or it was made with other credentials"
        )
    text = (
        f"no accumulator, parameters, layer or tensor {question.name!r} on {explanation.address}, and no error has "
        f"this code or name{_nearest(question.name)}"
    )
    if question.name.isdecimal():
        text += "; a request id of up to 64 bits was chosen by its caller, and only that client can look it up"
    similar = [name for each in explanation.found for name in each.similar]
    return f"{text}; similar names: {some(similar, _MOST_SHOWN)}" if similar else text


def _described(explanation: _Explanation, problems: Sequence[str]) -> dict[str, Any]:
    entry = explanation.question.entry
    return {
        "argument": explanation.question.text,
        "entry": entry,
        "other_codes": [each.code for each in _others(entry)] if entry else [],
        "address": explanation.address,
        "things": explanation.things,
        "requests": explanation.requests,
        "errors": [error for each in explanation.found for error in each.errors],
        "next": explanation.next_command,
        "problems": problems,
    }


def _others(entry: Entry) -> Sequence[Entry]:
    """Returns the finer entries of a class, for its own entry."""
    every = troubleshooting.entries_of(entry.error)
    return every[1:] if every[0] is entry else ()


def _show(explanation: _Explanation) -> None:
    entry = explanation.question.entry
    if entry is not None:
        tell(
            f"{entry.code}, of {entry.error}",
            f"  meaning: {entry.means}",
            f"  cure: {entry.cure}",
            *([f"  more: docs/{entry.page}"] if entry.page else []),
        )
        if others := _others(entry):
            tell(f"  finer codes: {', '.join(each.code for each in others)}")
    for answer in explanation.answers:
        if answer.value is not None and (answer.value.things or answer.value.errors):
            tell(*_state(answer.value, f"{answer.address}: " if len(explanation.answers) > 1 else ""))
    for each in explanation.requests[:_MOST_SHOWN]:
        words = (each.step and _ENDED.get(each.outcome)) or _OUTCOMES.get(each.outcome, each.outcome)
        tell(f"{each.kind} {each.container}/{each.name} knows the request: {words.format(step=each.step)}")


def _state(found: _Found, where: str) -> list[str]:
    lines = list[str]()
    for thing in found.things:
        lines += _thing_lines(thing, where)
    for error in found.errors:
        ago = duration(max(found.uptime - error.at, 0.0))
        lines.append(f"{where}{error.count} times {error.code} from {error.method}, {ago} ago: {error.message}")
    return lines


def _thing_lines(thing: _Thing, where: str) -> list[str]:
    state, title = thing.state, f"{where}{thing.kind} {thing.container}/{thing.name}"
    if thing.kind == one_of(TENSORS):
        return [f"{where}tensor {thing.name}: {state.dtype} {list(state.shape)}"]
    if thing.kind == one_of(LAYERS):
        return [f"{title}: {size(state.num_bytes)}, {state.num_forwards} forwards kept"]
    lease = "no lease" if thing.idle_lease is None else f"deleted after {duration(thing.idle_lease)} without use"
    if thing.kind == PARAMETERS:
        step, arrived, item = state.step, state.num_updates, "updates"
    else:
        step, arrived, item = state.global_step, state.num_accumulated, "gradients"
    needed = f" of {state.num_required}" if state.num_required else ""
    waiting = "1 call waits" if state.num_waiting == 1 else f"{state.num_waiting} calls wait"
    lines = [
        f"{title}: step {step}, {size(state.num_bytes)}, {lease}",
        f"  round: {arrived}{needed} {item}{_from(state.workers)}; {waiting}",
    ]
    if state.missing:
        lines.append(f"  missing from the round: {some(state.missing, _MOST_SHOWN)}")
    lines.append(f"  since the server started: {state.accepted} accepted, {state.stale} stale, {state.refused} refused")
    return lines + [f"  this looks like {code}: {BY_CODE[code].means}" for code in _signs(state)]


def _from(workers: Sequence[str]) -> str:
    return f" from {some([each or '(no id)' for each in workers], _MOST_SHOWN)}" if workers else ""


def _signs(state: "AccumulatorStatus | ParametersStatus") -> list[str]:
    """Returns the codes of the errors that users of an accumulator or of parameters may get soon."""
    arrived: int = getattr(state, "num_updates", 0) or getattr(state, "num_accumulated", 0)
    codes = []
    if getattr(state, "different", None):
        codes.append("GS_WEIGHTS_DIFFER")
    if state.num_waiting and arrived < state.num_required:
        codes.append("GS_ROUND_INCOMPLETE")
    if state.stale > state.accepted:
        codes.append("GS_STALE")
    return codes
