"""Google docstrings as Markdown."""

import re
import textwrap
from collections.abc import Callable

_SECTION = re.compile(r"(Args|Attributes|Returns|Raises|Yields|Example|Note):")
_TITLES = {"Args": "Arguments"}
_ITEM = re.compile(r"(\*{0,2}[\w.]+)(?: \([^)]*\))?: ?(.*)", re.DOTALL)
_NAME = re.compile(r"(?<!`)`([A-Za-z_][\w.]*)(\(.*?\))?`(?!`)")
_LISTED = ("Args", "Attributes", "Raises")

Link = Callable[[str], str | None]


def as_markdown(docstring: str, link: Link) -> str:
    """Returns a docstring as Markdown: paragraphs, and a list for each section of items.

    Args:
        docstring: The docstring, without indentation.
        link: Returns where a name is described; None if nowhere. Names in backquotes become links.
    """
    shown: list[str] = []
    title = ""
    for block in _blocks(docstring):
        found = _SECTION.fullmatch(block.splitlines()[0])
        if found:
            title = found[1]
            shown.append(f"**{_TITLES.get(title, title)}**")
            block = textwrap.dedent("\n".join(block.splitlines()[1:]))
        elif title and block.startswith("    "):
            block = textwrap.dedent(block)
        else:
            title = ""
        shown.append(_items(block, link) if title in _LISTED else _paragraph(block, link))
    return "\n\n".join(shown)


def _blocks(docstring: str) -> list[str]:
    return [block for block in re.split(r"\n\s*\n", docstring.strip("\n")) if block.strip()]


def _items(text: str, link: Link) -> str:
    items: list[str] = []
    for line in text.splitlines():
        if line.startswith(" ") and items:
            items[-1] += " " + line.strip()
        else:
            items.append(line)
    return "\n".join(f"* {_item(item, link)}" for item in items)


def _item(text: str, link: Link) -> str:
    found = _ITEM.fullmatch(text)
    if found is None:
        return _linked(text, link)
    return f"{_linked(f'`{found[1]}`', link)}: {_linked(found[2], link)}"


def _paragraph(text: str, link: Link) -> str:
    first, *more = text.splitlines()
    if "├──" in text:
        return f"```text\n{text}\n```"
    if first.startswith("    "):
        return f"```python\n{textwrap.dedent(text)}\n```"
    if first.endswith(":") and more and all(line.startswith("    ") for line in more):
        return f"{_linked(first, link)}\n\n{_items(textwrap.dedent(chr(10).join(more)), link)}"
    return _linked(text, link)


def _linked(text: str, link: Link) -> str:
    def replace(match: re.Match[str]) -> str:
        place = link(match[1])
        return f"[`{match[1]}{match[2] or ''}`]({place})" if place else match[0]

    return _NAME.sub(
        replace, re.sub(r"(?<![`\w])\*(?=\w)", r"\\*", text).replace("<", "&lt;") if "`" not in text else text
    )
