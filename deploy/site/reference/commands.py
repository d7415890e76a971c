"""The reference of the command line, from the commands themselves."""

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import click

from deploy.site.reference.settings import concerns
from gradserve_server.commands.cli import cli

_INTRODUCTION = """\
# Command line

All commands of `gradserve`, made from what they say about themselves with `--help`. They come with the `server` extra.
"""


def write_commands(folder: Path) -> None:
    """Writes commands.md."""
    sections = [_INTRODUCTION]
    for path, command in commands_below(cli, "gradserve"):
        sections += _section(path, command)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "commands.md").write_text("\n\n".join(sections) + "\n")


def commands_below(group: click.Group, path: str) -> Iterator[tuple[str, click.Command]]:
    """Yields every command and group below a group, with the words that call it."""
    for name, command in sorted(group.commands.items()):
        if command.hidden:
            continue
        yield f"{path} {name}", command
        if isinstance(command, click.Group):
            yield from commands_below(command, f"{path} {name}")


def _section(path: str, command: click.Command) -> Iterator[str]:
    level = "#" * (1 + path.count(" "))
    yield f"{level} `{path}` {{#{path.replace(' ', '-')}}}"
    # The command keeps its --help option, so that must have the names that the command line gives it.
    with click.Context(command, info_name=path, **cli.context_settings) as context:
        usage = " ".join(command.collect_usage_pieces(context))
        yield f"```text\n{path} {usage}\n```"
        yield from _paragraphs(inspect.cleandoc(command.help or ""))
        settings = {name for _title, fields in concerns() for name in fields} if path == "gradserve serve" else set()
        rows = [
            _row(parameter, context)
            for parameter in command.get_params(context)
            if parameter.name not in settings and _is_worth_a_row(parameter)
        ]
    if settings:
        yield "Every [setting](settings.md) is an option of this command. So is:"
    if rows:
        yield "\n".join(["| option | variable | default | meaning |", "|---|---|---|---|", *rows])


def _paragraphs(text: str) -> Iterator[str]:
    for paragraph in re.split(r"\n\s*\n", text.partition("\f")[0]):
        if paragraph.startswith("\b"):
            yield f"```text\n{inspect.cleandoc(paragraph[1:].lstrip(chr(10)))}\n```"
        else:
            yield _text(" ".join(paragraph.split()))


def _is_worth_a_row(parameter: click.Parameter) -> bool:
    if isinstance(parameter, click.Option):
        return not parameter.hidden and "--help" not in parameter.opts
    return bool(parameter.envvar or _default(parameter))


def _row(parameter: click.Parameter, context: click.Context) -> str:
    names = ", ".join(name for name in (*parameter.opts, *parameter.secondary_opts) if name.startswith("-"))
    takes_value = not (isinstance(parameter, click.Option) and (parameter.is_flag or parameter.count))
    metavar = parameter.make_metavar(context).removesuffix(" RANGE") if takes_value else ""
    option = f"`{' '.join(filter(None, [names, metavar]))}`"
    variable = f"`{parameter.envvar}`" if parameter.envvar else ""
    meaning = _text(getattr(parameter, "help", None) or "")
    return f"| {option} | {variable} | {_default(parameter)} | {meaning} |"


def _default(parameter: click.Parameter) -> str:
    default = parameter.default
    is_shown = isinstance(default, int | float | str | Path) and not isinstance(default, bool)
    return f"`{default}`" if is_shown and default != "" else ""


def _text(text: str) -> str:
    return re.sub(r"[*<|]", lambda match: {"*": "\\*", "<": "&lt;", "|": "\\|"}[match[0]], text)
