"""The kinds of things that commands list, show and delete."""

import click

ACCUMULATORS, LAYERS, TENSORS = "accumulators", "layers", "tensors"
_KINDS = (ACCUMULATORS, LAYERS, TENSORS)


class Kind(click.ParamType[str]):
    """A kind, in the plural or the singular."""

    name = "kind"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Returns the kind in the plural."""
        found = [kind for kind in _KINDS if value.casefold() in (kind, kind.removesuffix("s"))]
        if not found:
            self.fail(f"expected accumulators, layers or tensors, got {value!r}", param, ctx)
        return found[0]

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        """Returns the kinds, for the help."""
        return "[accumulators|layers|tensors]"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[click.shell_completion.CompletionItem]:
        """Returns the kinds that begin with what has been typed."""
        return [click.shell_completion.CompletionItem(kind) for kind in _KINDS if kind.startswith(incomplete)]


container_option = click.option("--container", metavar="NAME", default="", help="the container  [default: default]")
