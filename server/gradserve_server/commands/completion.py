"""`gradserve completion`: prints what makes a shell complete commands and options."""

import click
from click.shell_completion import get_completion_class

_SHELLS = ("bash", "zsh", "fish")


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
