"""Comments of protos as Markdown."""

import re
from collections.abc import Callable

_LABEL = re.compile(r"([A-Z][A-Z_]{3,}(?:, [A-Z][A-Z_]{3,})*|Blocking|Retry)\b(?=[:,])")
_CODE = re.compile(r"`[^`]+`|\b[A-Z][A-Za-z]+\.[a-z]\w*\b|\b[A-Za-z]+(?:_[A-Za-z0-9]+)+\b(?!\()")
_TYPE = re.compile(r"\b[A-Z][a-z0-9]+(?:[A-Z]+[a-z0-9]*)+(?:\.[A-Za-z_]+)?\b")
_SPECIAL = re.compile(r"[\\*<>\[\]#|]")


def as_markdown(comment: str, link: Callable[[str], str | None]) -> str:
    """Returns a comment as Markdown.

    Lines that begin with a status code, "Blocking:" or "Retry:" become items of a list. Identifiers become code; names
    of services, methods and messages become links.

    Args:
        comment: The comment, without its slashes.
        link: Returns where a name is described; None for what is no such name.
    """
    return "\n\n".join(_paragraph(text, link) for text in re.split(r"\n\s*\n", comment.strip()) if text)


def in_a_cell(comment: str, link: Callable[[str], str | None]) -> str:
    """Returns a comment as the contents of a cell of a table."""
    return "<br>".join(_inline(" ".join(text.split()), link) for text in re.split(r"\n\s*\n", comment.strip()))


def _paragraph(text: str, link: Callable[[str], str | None]) -> str:
    parts: list[str] = []
    for line in text.splitlines():
        if not parts or _LABEL.match(line.strip()):
            parts.append(line.strip())
        else:
            parts[-1] += " " + line.strip()
    shown = []
    for part in parts:
        label = _LABEL.match(part)
        if label:
            shown.append(f"* **{label[0]}**{_inline(part[label.end() :], link)}")
        else:
            shown.append(_inline(part, link) + ("\n" if len(parts) > 1 else ""))
    return "\n".join(shown)


def _inline(text: str, link: Callable[[str], str | None]) -> str:
    shown, end = [], 0
    for code in _CODE.finditer(text):
        shown.append(_plain(text[end : code.start()], link))
        shown.append(_code(code[0].strip("`"), link))
        end = code.end()
    return "".join([*shown, _plain(text[end:], link)])


def _code(name: str, link: Callable[[str], str | None]) -> str:
    place = link(name)
    return f"[`{name}`]({place})" if place else f"`{name}`"


def _plain(text: str, link: Callable[[str], str | None]) -> str:
    def linked(match: re.Match[str]) -> str:
        place = link(match[0])
        return f"[{match[0]}]({place})" if place else match[0]

    return _TYPE.sub(linked, _SPECIAL.sub(lambda match: "\\" + match[0], text))
