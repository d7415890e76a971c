"""The servers at an address, and what is on them: options that name these, completions, questions to each server."""

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from gradserve_protocol.variables import ADDRESS_VARIABLE, DEFAULT_ADDRESS
from gradserve_server.commands.tls_options import tls_options
from gradserve_server.commands.wording import ExitCode, as_plain, tell_problem
from gradserve_server.config.settings import SettingsError
from gradserve_server.runtime.process import silence_grpc

if TYPE_CHECKING:
    import gradserve
    from gradserve_protocol.server_status import ServerStatus


F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

_MOST_THREADS = 64
_ARGUMENT, _OPTION = "gradserve_protocol.address.argument", "gradserve_protocol.address.option"
"""The keys under which the callbacks of a command keep the values of ADDRESS and of --address."""


def keep_address_argument(context: click.Context, address: str) -> None:
    """Takes a word of the command line for its ADDRESS, for `with_address` to find."""
    context.meta[_ARGUMENT] = address


def _keep_option(context: click.Context, _option: click.Parameter, address: str | None) -> None:
    context.meta[_OPTION] = address


def _chosen(context: click.Context, option: click.Parameter, argument: str | None) -> str:
    argument = argument or context.meta.get(_ARGUMENT)
    given = context.meta.get(_OPTION)
    if argument is None:
        return given or DEFAULT_ADDRESS
    is_from_command_line = context.get_parameter_source(_OPTION_NAME) is ParameterSource.COMMANDLINE
    if is_from_command_line and given != argument and not context.resilient_parsing:
        raise click.UsageError(f"expected one address, got {argument!r} as ADDRESS and {given!r} as --address", context)
    return argument


_OPTION_NAME = "given_address"
_ADDRESS_ARGUMENT = click.argument("address", required=False, callback=_chosen)
_ABOUT_OPTION: dict[str, Any] = {
    "metavar": "ADDRESS",
    "envvar": ADDRESS_VARIABLE,
    "help": "the server: HOST:PORT or unix:PATH; or all servers of a cluster: with commas between them, "
    f"dns+srv://SERVICE or gradserve+ray://NAME  [default: {DEFAULT_ADDRESS}]",
}
_ADDRESS_OPTION = click.option(
    "--address", "-a", _OPTION_NAME, is_eager=True, expose_value=False, callback=_keep_option, **_ABOUT_OPTION
)
address_option = click.option("--address", "-a", default=DEFAULT_ADDRESS, **_ABOUT_OPTION)
"""--address alone, for a command whose last argument takes any number of words."""
_TIMEOUT_OPTION = click.option(
    "--timeout", type=float, default=5.0, show_default=True, help="seconds to wait at most, or inf"
)


def connection_options(command: F) -> F:
    """Gives a command the options --timeout and --tls..., for `connected` and `tls_of`."""
    return _TIMEOUT_OPTION(tls_options(command))


def server_options(command: F) -> F:
    """Gives a command the argument ADDRESS, the option --address for the same, and those of `connection_options`.

    The command has one parameter `address` for both. Without either, it is that of GRADSERVE_ADDRESS, or the default.
    """
    return _ADDRESS_ARGUMENT(_ADDRESS_OPTION(connection_options(command)))


def tls_of(
    *, uses_tls: bool, tls_ca: str | None, tls_client_certificate: str | None, tls_client_key: str | None
) -> "gradserve.TLS | None":
    """Returns the `gradserve.TLS` of the options, None for none.

    Raises:
        SettingsError: The options do not go together.
    """
    import gradserve

    if not (uses_tls or tls_ca or tls_client_certificate or tls_client_key):
        return None
    try:
        return gradserve.TLS(tls_ca or None, tls_client_certificate or None, tls_client_key or None)
    except gradserve.InvalidArgumentError as error:
        raise SettingsError(error.message) from None


@contextmanager
def connected(address: str, timeout: float, **options: Any) -> Iterator["gradserve.Client"]:
    """Connects to a server, and turns errors of its client into messages of one line.

    Args:
        address: The address.
        timeout: Seconds that each call waits.
        **options: The TLS options; others go to `gradserve.connect`.

    Raises:
        SettingsError: The address or an option is not valid.
        click.ClickException: A call has failed.
    """
    silence_grpc()
    import gradserve

    tls = {name: options.pop(name) for name in list(options) if name == "uses_tls" or name.startswith("tls_")}
    try:
        with gradserve.connect(address, timeout=timeout, tls=tls_of(**tls), **options) as client:
            yield client
    except gradserve.InvalidArgumentError as error:
        raise SettingsError(error.message) from None
    except gradserve.GradserveError as error:
        raise click.ClickException(f"{address}: {error}") from None


def status_about(client: "gradserve.Client", container: str, name: str) -> "ServerStatus":
    """Returns the status of the accumulators and parameters of a container whose names contain a name."""
    return client.server_status(container=container, name_contains=f"{container}/{name}", max_accumulators=1000)


def on_server(words: Sequence[str], address: str, tls_options: Mapping[str, Any]) -> str:
    """Returns a command for a shell that asks the server at an address.

    Args:
        words: The words of the command; its last argument is the address.
        address: The address.
        tls_options: The options of `tls_of`, which the command gets, too.
    """
    options = [
        ("--tls-ca", tls_options.get("tls_ca")),
        ("--tls-client-certificate", tls_options.get("tls_client_certificate")),
        ("--tls-client-key", tls_options.get("tls_client_key")),
    ]
    given = [word for name, value in options if value for word in (name, value)]
    to = ["--address"] if "rm" in words[:2] else []
    return shlex.join([*words, *to, address, *(["--tls"] if tls_options.get("uses_tls") else []), *given])


@dataclass(frozen=True)
class Answer(Generic[T]):
    """The answer of a server.

    Attributes:
        index: Its number in the list of servers.
        address: Its address.
        value: The answer; None if there is none.
        problem: Why there is none; empty if there is one.
    """

    index: int
    address: str
    value: T | None = None
    problem: str = ""


def servers_at(address: str, timeout: float) -> tuple[str, ...]:
    """Returns the addresses of the servers in their order: of one, or of those that the address lists or stands for.

    Args:
        address: What `gradserve.connect` takes as one text.
        timeout: Seconds to wait for servers that are not up yet, if the address stands for them.

    Raises:
        SettingsError: The address is not valid.
        click.ClickException: What looks servers up does not find them.
    """
    import gradserve
    from gradserve.discovery import servers_to_connect

    try:
        found = tuple(map(str, servers_to_connect(address, timeout)))
    except gradserve.InvalidArgumentError as error:
        raise SettingsError(error.message) from None
    except gradserve.GradserveError as error:
        raise click.ClickException(f"{address}: {error}") from None
    is_named = len(found) == 1 and ("://" not in address or address.startswith("unix:"))
    return (address,) if is_named else found  # As it was written, messages name it.


def ask_all(
    address: str, timeout: float, question: "Callable[[gradserve.Client], T]", **tls: Any
) -> tuple[Answer[T], ...]:
    """Asks the servers at an address at the same time; returns their answers in the order of the servers.

    Args:
        address: What `gradserve.connect` takes as one text.
        timeout: Seconds that each call waits.
        question: Asks the server of a client.
        **tls: The TLS options.

    Raises:
        SettingsError: The address or an option is not valid.
        click.ClickException: There is a single server, and it does not answer; or servers cannot be looked up.
    """
    silence_grpc()
    servers = servers_at(address, timeout)
    if len(servers) == 1:
        with connected(servers[0], timeout, **tls) as client:
            return (Answer(0, client.address, question(client)),)
    files = tls_of(**tls)

    def ask(index: int) -> Answer[T]:
        return ask_one(servers, index, timeout, files, question)

    with ThreadPoolExecutor(min(_MOST_THREADS, len(servers))) as threads:
        return tuple(threads.map(ask, range(len(servers))))


def ask_one(
    servers: Sequence[str],
    index: int,
    timeout: float,
    tls: "gradserve.TLS | None",
    question: "Callable[[gradserve.Client], T]",
) -> Answer[T]:
    """Asks one of several servers, if it is the member of the cluster that the list says.

    Raises:
        SettingsError: A file of `tls` cannot be used.
    """
    import gradserve

    try:
        client = gradserve.connect(servers[index], timeout=timeout, tls=tls)
    except gradserve.InvalidArgumentError as error:
        raise SettingsError(error.message) from None
    try:
        with client:
            if problem := misplaced(client.server_info().member, index, len(servers)):
                return Answer(index, servers[index], problem=problem)
            return Answer(index, servers[index], question(client))
    except gradserve.GradserveError as error:
        return Answer(index, servers[index], problem=str(error))


def misplaced(member: str, index: int, size: int) -> str:
    """Returns what is wrong with a server at a place in a list of servers; empty if it belongs there.

    Args:
        member: Its place in its cluster, as `ServerInfo.member`.
        index: The place in the list.
        size: The length of the list.
    """
    cluster, _, place = member.rpartition(" ")
    if place == f"{index}/{size}":
        return ""
    if not member:
        return f"it is in no cluster, and {index} of {size} in this list"
    number, _, of = place.partition("/")
    return f"it is server {number} of {of} in cluster {cluster!r}, and {index} of {size} in this list"


def tell_problems(answers: Sequence[Answer[Any]]) -> None:
    """Prints, on standard error, which servers have not answered, and ends the command with FAILED if there are any."""
    silent = [each for each in answers if each.problem]
    for each in silent:
        tell_problem(f"server {each.index} at {each.address}: {each.problem}")
    if silent:
        click.get_current_context().exit(ExitCode.FAILED)


def described_servers(answers: Sequence[Answer[Any]]) -> list[dict[str, Any]]:
    """Returns the servers, for JSON: which they are, and why they have not answered."""
    return [{"index": each.index, "address": each.address, "problem": each.problem} for each in answers]


def described_things(
    title: str, found: Iterable[tuple[int, Any]], answers: Sequence[Answer[Any]], **more: Any
) -> dict[str, Any]:
    """Returns what servers have, for JSON; if there are several, each thing with the index of its server, and these.

    Args:
        title: The name of the list of things.
        found: The things, dataclasses, each after the index of its server.
        answers: The answers of the servers.
        more: What else there is to say.
    """
    if len(answers) == 1:
        return {title: [as_plain(thing) for _, thing in found], **more}
    things = [{"server": index, **as_plain(thing)} for index, thing in found]
    return {title: things, **more, "servers": described_servers(answers)}


ACCUMULATORS, PARAMETERS, LAYERS, TENSORS = "accumulators", "parameters", "layers", "tensors"
KINDS = (ACCUMULATORS, PARAMETERS, LAYERS, TENSORS)
AT_HOME = (ACCUMULATORS, PARAMETERS)
"""The kinds that are on one server of a cluster, which their names decide."""
_COMPLETION_SECONDS = 1.0
"""The longest wait for a server after a key press."""
_IN_WORDS = "_@%+=:,./-"
"""Characters without a meaning to shells within a word."""


def one_of(kind: str) -> str:
    """Returns the word for one of a kind."""
    return kind if kind == PARAMETERS else kind.removesuffix("s")


class Kind(click.ParamType[str]):
    """A kind, in the plural or the singular."""

    name = "kind"

    def __init__(self, kinds: Sequence[str] = KINDS) -> None:
        self._kinds = kinds

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Returns the kind in the plural."""
        found = [kind for kind in self._kinds if value.casefold() in (kind, kind.removesuffix("s"))]
        if not found:
            listed = f"{', '.join(self._kinds[:-1])} or {self._kinds[-1]}"
            self.fail(f"expected {listed}, got {value!r}", param, ctx)
        return found[0]

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        """Returns the kinds, for the help."""
        return f"{{{'|'.join(self._kinds)}}}" if param.required else f"[{'|'.join(self._kinds)}]"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Returns the kinds that begin with what has been typed."""
        return [CompletionItem(kind) for kind in self._kinds if kind.startswith(incomplete)]


def complete_names(context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Returns the accumulators, parameters, layers or handles of tensors that begin with what has been typed.

    Returns none if the server does not answer for any reason, because a message would garble the command line. Shells
    insert names verbatim, so names that are not one plain word are left out.
    """
    return _completed([context.params.get("kind")], context, incomplete)


def complete_parameters(context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Returns the parameters that begin with what has been typed."""
    return _completed([PARAMETERS], context, incomplete)


def complete_rounds(context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Returns the accumulators and parameters that begin with what has been typed."""
    return _completed((ACCUMULATORS, PARAMETERS), context, incomplete)


def _completed(kinds: Sequence[str | None], context: click.Context, incomplete: str) -> list[CompletionItem]:
    options = dict(context.params)
    container = options.pop("container", None) or ""
    given = options.pop("names", None) or ()
    address = options.pop("address", None) or DEFAULT_ADDRESS
    tls = {name: value for name, value in options.items() if name == "uses_tls" or name.startswith("tls_")}
    try:
        with connected(address, _COMPLETION_SECONDS, **tls) as client:
            names = [name for kind in kinds for name in _names(client, kind, container)]
    except Exception:  # even an invalid settings file
        return []
    return [
        CompletionItem(name) for name in names if name.startswith(incomplete) and name not in given and _is_a_word(name)
    ]


def _is_a_word(name: str) -> bool:
    """True if a name is one word to every shell, and no option to a command."""
    return not name.startswith("-") and all(each.isalnum() or each in _IN_WORDS for each in name)


def _names(client: "gradserve.Client", kind: str | None, container: str) -> list[str]:
    if kind == ACCUMULATORS:
        return [each.name for each in client.list_accumulators(container)]
    if kind == PARAMETERS:
        return [each.name for each in client.list_parameters(container)]
    if kind == LAYERS:
        return [each.name for each in client.list_batch_norm_layers(container)]
    return [each.handle for each in client.list_tensors()] if kind == TENSORS else []
