"""The commands in blocks of a console or of a shell."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from tests.project.blocks.reading import Block

_OPERATORS = set("();<>|&")
_REDIRECTIONS = {">", ">>", "<", ">&"}
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)


@dataclass(frozen=True)
class Command:
    """One command.

    Attributes:
        variables: The environment variables that are set for it alone.
        words: The program and its arguments.
        output: What it prints, by the block; "" for commands of a shell.
    """

    variables: dict[str, str]
    words: tuple[str, ...]
    output: str

    def __str__(self) -> str:
        return shlex.join(self.words)


def commands_in(block: Block) -> Iterator[Command]:
    """Yields the commands of a block, those between operators one by one."""
    for line, output in _lines(block):
        for variables, words in _simple_commands(line):
            yield Command(variables, words, output)


def _lines(block: Block) -> Iterator[tuple[str, str]]:
    """Yields each line of the shell, and what is printed under it."""
    text = re.sub(r"\\\n\s*", " ", block.text)
    if block.language != "console":
        yield from ((line, "") for line in text.splitlines() if line.strip())
        return
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        line, _, output = part.partition("\n")
        yield line, output


def _simple_commands(line: str) -> Iterator[tuple[dict[str, str], tuple[str, ...]]]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words: list[str] = []
    tokens = iter([*lexer, "&"])
    for token in tokens:
        if token in _REDIRECTIONS:
            next(tokens)  # the file
        elif set(token) <= _OPERATORS:
            if words:
                yield _without_variables(words)
            words = []
        else:
            words.append(token)


def _without_variables(words: list[str]) -> tuple[dict[str, str], tuple[str, ...]]:
    variables = {}
    while words and (found := _ASSIGNMENT.fullmatch(words[0])):
        variables[found[1]] = found[2]
        words = words[1:]
    return variables, tuple(words)
