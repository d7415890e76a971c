"""The kinds of things on servers, and the completion of kinds and names."""

from typing import TYPE_CHECKING

import click
from click.shell_completion import CompletionItem

from gradserve_server.commands.servers import DEFAULT_ADDRESS, connected

if TYPE_CHECKING:
    import gradserve

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

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Returns the kind in the plural."""
        found = [kind for kind in KINDS if value.casefold() in (kind, kind.removesuffix("s"))]
        if not found:
            self.fail(f"expected accumulators, parameters, layers or tensors, got {value!r}", param, ctx)
        return found[0]

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        """Returns the kinds, for the help."""
        return f"{{{'|'.join(KINDS)}}}" if param.required else f"[{'|'.join(KINDS)}]"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Returns the kinds that begin with what has been typed."""
        return [CompletionItem(kind) for kind in KINDS if kind.startswith(incomplete)]


def complete_names(context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Returns the accumulators, parameters, layers or handles of tensors that begin with what has been typed.

    Returns none if the server does not answer for any reason, because a message would garble the command line. Shells
    insert names verbatim, so names that are not one plain word are left out.
    """
    return _completed(context.params.get("kind"), context, incomplete)


def complete_parameters(context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Returns the parameters that begin with what has been typed."""
    return _completed(PARAMETERS, context, incomplete)


def _completed(kind: str | None, context: click.Context, incomplete: str) -> list[CompletionItem]:
    options = dict(context.params)
    container = options.pop("container", None) or ""
    given = options.pop("names", None) or ()
    address = options.pop("address", None) or DEFAULT_ADDRESS
    tls = {name: value for name, value in options.items() if name == "uses_tls" or name.startswith("tls_")}
    try:
        with connected(address, _COMPLETION_SECONDS, **tls) as client:
            names = _names(client, kind, container)
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
