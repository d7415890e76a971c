"""The command line with all its commands."""

from typing import Any

import click
from click.shell_completion import get_completion_class

from gradserve_demo.command import demo
from gradserve_protocol.printing import visible_lines
from gradserve_server.commands.bench import bench
from gradserve_server.commands.cluster import cluster
from gradserve_server.commands.credentials import certificates, token
from gradserve_server.commands.doctor.command import doctor
from gradserve_server.commands.explain import explain
from gradserve_server.commands.export.command import export
from gradserve_server.commands.history import history
from gradserve_server.commands.info import health, info
from gradserve_server.commands.kernels import kernels
from gradserve_server.commands.logs import logs
from gradserve_server.commands.parameters import parameters
from gradserve_server.commands.plan import plan
from gradserve_server.commands.resources import ls, rm, show
from gradserve_server.commands.run.command import run
from gradserve_server.commands.serve import serve
from gradserve_server.commands.state import state
from gradserve_server.commands.top.command import top
from gradserve_server.commands.what_if import what_if
from gradserve_server.commands.wording import exit_codes

_SHELLS = ("bash", "zsh", "fish")


def _show_version(context: click.Context, _option: click.Parameter, is_wanted: bool) -> None:
    if is_wanted and not context.resilient_parsing:
        import gradserve

        click.echo(f"gradserve, version {gradserve.__version__}")
        context.exit()


class _Commands(click.Group):
    """The commands. Makes error messages printable, since they may contain texts from servers and files."""

    def invoke(self, ctx: click.Context) -> Any:
        """Runs a command."""
        try:
            return super().invoke(ctx)
        except click.ClickException as error:
            vars(error)["message"] = visible_lines(error.message)  # which click calls final
            raise


_EXIT_CODES = "\b\nExit codes:\n" + "\n".join(f"  {code:8}{meaning}" for code, meaning in exit_codes())


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]}, epilog=_EXIT_CODES)
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_show_version, help="Show the version."
)
def cli() -> None:
    """Gradient averaging and gradient ops over gRPC."""


@click.command()
@click.argument("shell", type=click.Choice(_SHELLS))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print a script that makes a SHELL complete gradserve's commands and options.

    For this shell: source <(gradserve completion bash). For all shells to come, add that line to ~/.bashrc or ~/.zshrc;
    for fish: gradserve completion fish > ~/.config/fish/completions/gradserve.fish
    """
    found = get_completion_class(shell)
    assert found is not None, "click completes for these shells"
    try:
        script = found(context.find_root().command, {}, "gradserve", "_GRADSERVE_COMPLETE").source()
    except RuntimeError as error:
        raise click.ClickException(str(error)) from None
    click.echo(script)


for command in (
    bench,
    certificates,
    cluster,
    completion,
    demo,
    doctor,
    explain,
    export,
    health,
    history,
    info,
    kernels,
    logs,
    ls,
    parameters,
    plan,
    rm,
    run,
    serve,
    show,
    state,
    token,
    top,
    what_if,
):
    cli.add_command(command)
