"""Writes the tables of the documentation that follow from the code.

    python -m deploy.tables            fails if a page has another table
    python -m deploy.tables --write    writes the tables into the pages

They are the environment variables in docs/environment_variables.md, from the options of all commands and the variables
of clients; the exit codes in docs/command_output.md; and the codes of errors in docs/error_codes.md.
"""

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import click

from deploy.site.reference.commands import commands_below
from gradserve_protocol.troubleshooting import ENTRIES
from gradserve_protocol.variables import CONNECT_VARIABLES, VARIABLES, WORKER_VARIABLES
from gradserve_server.commands import wording
from gradserve_server.commands.cli import cli

DOCS = Path(__file__).parents[1] / "docs"


class DifferentTextsError(Exception):
    """Commands describe a variable in different words."""


def environment_variables() -> str:
    """Returns the table of all environment variables.

    Raises:
        DifferentTextsError: Commands describe a variable in different words.
    """
    options: dict[str, tuple[set[str], set[str]]] = {}
    for path, command in commands_below(cli, "gradserve"):
        for variable, text in _variables_of(command):
            commands, texts = options.setdefault(variable, (set(), set()))
            commands.add(path.removeprefix("gradserve ").partition(" ")[0])
            texts.add(text)
    rows = {variable: ("clients", text) for variable, text in VARIABLES.items()}
    rows |= {variable: (_code("run"), text) for variable, text in WORKER_VARIABLES.items()}
    for variable, (commands, texts) in options.items():
        if len(texts) > 1:
            raise DifferentTextsError(f"{variable}: {' / '.join(sorted(texts))}")
        users = {"commands"} if len(commands) > 2 else set(map(_code, commands))
        if variable in rows:  # the server's setting and that of clients have one name
            users |= {"clients"}
            texts = {f"{rows[variable][1]}; {min(texts)}"}
        elif variable in CONNECT_VARIABLES:
            users |= {"clients"}
        rows[variable] = ", ".join(sorted(users)), min(texts)
    return _table(("variable", "of", "what it says"), ((_code(name), *rows[name]) for name in sorted(rows)))


def exit_codes() -> str:
    """Returns the table of the exit codes."""
    return _table(("exit code", "meaning"), wording.exit_codes())


def error_codes() -> str:
    """Returns the table of the codes of errors, each with an anchor."""
    rows = []
    for each in ENTRIES:
        commands = [_code(command.removesuffix(" ADDRESS").removesuffix(" --address")) for command in each.commands]
        remedies = [
            each.cure,
            *([" or ".join(commands)] if commands else []),
            *([_link(each.page)] if each.page else []),
        ]
        error = _code(each.error) + (f": {_code(each.says)}" if each.says else "")
        rows.append((each.code, error, each.means, "; ".join(remedies)))
    table = _table(("code", "error, and a part of its message", "what it means", "what to do"), rows)
    return re.sub(r"^\| (GS_\w+) ", _with_anchor, table, flags=re.MULTILINE)


TABLES: Mapping[str, tuple[Path, Callable[[], str]]] = {
    "environment variables": (DOCS / "environment_variables.md", environment_variables),
    "exit codes": (DOCS / "command_output.md", exit_codes),
    "codes of errors": (DOCS / "error_codes.md", error_codes),
}
"""The tables by the name in their markers: the page, and what makes the table."""


def with_table(page: str, name: str, table: str) -> str:
    """Returns a page with a table between its markers.

    Raises:
        ValueError: It has no such markers.
    """
    start, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    before, found, rest = page.partition(start)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise ValueError(f"expected {start.strip()} and {end}")
    return f"{before}{start}{table}\n{end}{after}"


def _variables_of(command: click.Command) -> Iterator[tuple[str, str]]:
    for parameter in command.params:
        if isinstance(parameter, click.Option) and isinstance(parameter.envvar, str):
            yield parameter.envvar, parameter.help or ""


def _table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [heads, ("---",) * len(heads), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _cell(text: str) -> str:
    return re.sub(r"  \[default: ([^\]]*)\]", r"; `\1` by default", text).replace("|", "\\|").replace("<", "&lt;")


def _with_anchor(found: re.Match[str]) -> str:
    return f'| <a id="{found[1].lower()}"></a>`{found[1]}` '


def _link(page: str) -> str:
    """Returns a link to a page, with the title of the page, or of its section if there is an anchor."""
    path, _, anchor = page.partition("#")
    headings = re.findall(r"^#+ (.+)$", (DOCS / path).read_text(), re.MULTILINE)
    title = next(each for each in headings if not anchor or _slug(each) == anchor)
    return f"[{title}]({page})"


def _slug(heading: str) -> str:
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def _code(text: str) -> str:
    return f"`{text}`"


def main() -> None:
    """Checks the tables, or writes them."""
    for name, (page, make) in TABLES.items():
        text = page.read_text()
        wanted = with_table(text, name, make())
        if "--write" in sys.argv[1:]:
            page.write_text(wanted)
        elif wanted != text:
            sys.exit(f"{page.name} has another table of {name}: python -m deploy.tables --write")


if __name__ == "__main__":
    main()
