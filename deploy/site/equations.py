"""Equations as MathML, made when the site is built: browsers show it without a script or a font.

An extension of Python-Markdown: `$...$` inside a line, and fenced blocks of the language `math`, as on code hosts.
"""

from typing import Any

from latex2mathml.converter import convert
from markdown import Markdown
from markdown.extensions import Extension
from markdown.inlinepatterns import InlineProcessor

_INLINE = r"(?<![\\$\w])\$(?=[^\s$])([^$\n]*[^\s$\\])\$(?![\d$])"
_BEFORE_ESCAPES = 185  # backslashes and underlines in it belong to LaTeX; code spans come first


class _Inline(InlineProcessor):
    def handleMatch(self, m: Any, data: str) -> tuple[str, int, int]:  # noqa: N802
        return self.md.htmlStash.store(convert(m[1])), m.start(0), m.end(0)


class Equations(Extension):
    """Finds equations inside lines."""

    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802
        """Adds the pattern, right after code spans."""
        md.inlinePatterns.register(_Inline(_INLINE, md), "equation", _BEFORE_ESCAPES)


def makeExtension(**options: Any) -> Equations:  # noqa: N802
    """Returns the extension: Python-Markdown looks for this name."""
    return Equations(**options)


def block(source: str, _language: str, _css_class: str, _options: Any, _md: Markdown, **_more: Any) -> str:
    """Returns a fenced block as a displayed equation: SuperFences calls it."""
    return f'<div class="equation">{convert(source.strip(), display="block")}</div>'
