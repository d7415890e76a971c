"""The blocks of code in the documentation, and what comments right before them say about their test."""

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field

from deploy.site.hidden import COMMENT
from deploy.site.places import ROOT, is_page, tracked

_BLOCK = re.compile(
    r"(?P<comments>(?:^[ ]*<!--(?:(?!-->).)*-->\s*?\n+)*)^(?P<indent> *)(?P<fence>`{3,})(?P<language>[\w+-]*)[^\n]*\n"
    r"(?P<text>.*?)^(?P=indent)(?P=fence)[ ]*$",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Block:
    """A block of code, with the line on which it begins and what the comments before it say."""

    page: str
    line: int
    language: str
    text: str
    said: dict[str, str] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[str]:
    """Returns the paths of all pages with blocks that are tested."""
    return sorted(path for path in tracked() if path == "README.md" or is_page(path))


def read_blocks(page: str) -> Iterator[Block]:
    """Yields the blocks of a page, in its order."""
    yield from blocks_in((ROOT / page).read_text(), page)


def blocks_in(text: str, page: str) -> Iterator[Block]:
    """Yields the blocks of a text."""
    for found in _BLOCK.finditer(text):
        said = {key: textwrap.dedent(value).strip() for key, value in COMMENT.findall(found["comments"])}
        line = text.count("\n", 0, found.start("text")) + 1
        yield Block(page, line, found["language"], textwrap.dedent(found["text"]), said)


def all_blocks(*languages: str) -> list[Block]:
    """Returns all blocks in some languages."""
    return [block for page in pages() for block in read_blocks(page) if block.language in languages]
