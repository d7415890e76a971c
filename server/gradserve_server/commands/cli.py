"""The command line: all commands together."""

from typing import Any

import click

from gradserve_demo.command import demo
from gradserve_server.commands.bench.command import bench
from gradserve_server.commands.certificates import certificates
from gradserve_server.commands.cluster.command import cluster
from gradserve_server.commands.completion import completion
from gradserve_server.commands.health import health
from gradserve_server.commands.info import info
from gradserve_server.commands.kernels import kernels
from gradserve_server.commands.ls import ls
from gradserve_server.commands.plan import plan
from gradserve_server.commands.rm import rm
from gradserve_server.commands.serve import serve
from gradserve_server.commands.show import show
from gradserve_server.commands.state import state
from gradserve_server.commands.token import token
from gradserve_server.commands.top.command import top
from gradserve_server.limits import visible_lines


def _show_version(context: click.Context, _option: click.Parameter, is_wanted: bool) -> None:
    if is_wanted and not context.resilient_parsing:
        import gradserve

        click.echo(f"gradserve, version {gradserve.__version__}")
        context.exit()


class _Commands(click.Group):
    """The commands, whose errors may have texts from elsewhere in them: what a server says, names in files."""

    def invoke(self, ctx: click.Context) -> Any:
        """Runs a command."""
        try:
            return super().invoke(ctx)
        except click.ClickException as error:
            vars(error)["message"] = visible_lines(error.message)  # which click calls final
            raise


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_show_version, help="Show the version."
)
def cli() -> None:
    """Gradient averaging and gradient ops over gRPC."""


for command in (
    bench,
    certificates,
    cluster,
    completion,
    demo,
    health,
    info,
    kernels,
    ls,
    plan,
    rm,
    serve,
    show,
    state,
    token,
    top,
):
    cli.add_command(command)
