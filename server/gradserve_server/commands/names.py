"""Completes the names of what is on a server."""

from typing import TYPE_CHECKING

import click
from click.shell_completion import CompletionItem

from gradserve_server.commands.kinds import ACCUMULATORS, LAYERS, TENSORS
from gradserve_server.commands.server_address import DEFAULT_ADDRESS, connected

if TYPE_CHECKING:
    import gradserve

_TIMEOUT_SECONDS = 1.0
"""Whoever has pressed a key does not wait for longer."""
_IN_WORDS = "_@%+=:,./-"
"""Signs that mean nothing to a shell within a word."""


def complete_names(context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Returns the accumulators, layers or handles of tensors that begin with what has been typed.

    None if the server does not tell them, whatever the reason: a message would be in the middle of the line. Shells put
    names into the line as they are, so those that would be more there than a word are left out.
    """
    options = dict(context.params)
    kind, container = options.pop("kind", None), options.pop("container", None) or ""
    given = options.pop("names", None) or ()
    address = options.pop("address", None) or DEFAULT_ADDRESS
    tls = {name: value for name, value in options.items() if name == "uses_tls" or name.startswith("tls_")}
    try:
        with connected(address, _TIMEOUT_SECONDS, **tls) as client:
            names = _names(client, kind, container)
    except Exception:  # also what a file of settings says wrongly
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
    if kind == LAYERS:
        return [each.name for each in client.list_batch_norm_layers(container)]
    return [each.handle for each in client.list_tensors()] if kind == TENSORS else []
