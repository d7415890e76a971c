"""Equations as MathML, made when the site is built: browsers show it without a script or a font.

An extension of Python-Markdown: `$...$` inside a line, and fenced blocks of the language `math`, as on code hosts.
"""

import re
from typing import Any

from latex2mathml.converter import convert
from markdown import Markdown
from markdown.extensions import Extension
from markdown.inlinepatterns import InlineProcessor

INLINE = r"(?<![\\$\w])\$(?=[^\s$])([^$\n]*[^\s$\\])\$(?![\d$])"
_BEFORE_ESCAPES = 185  # backslashes and underlines in it belong to LaTeX; code spans come first
_LEFT_OVER = re.compile(r"\\[A-Za-z]+")


class UnknownCommandError(Exception):
    """An equation has a command of LaTeX that cannot be converted."""


def as_mathml(latex: str, display: str = "inline") -> str:
    """Returns an equation as MathML.

    Raises:
        UnknownCommandError: A command cannot be converted.
    """
    mathml: str = convert(latex, display=display)
    if found := _LEFT_OVER.search(mathml):
        raise UnknownCommandError(f"{found[0]} in {latex}")
    return mathml


class _Inline(InlineProcessor):
    def handleMatch(self, m: Any, data: str) -> tuple[str, int, int]:  # noqa: N802
        return self.md.htmlStash.store(as_mathml(m[1])), m.start(0), m.end(0)


class Equations(Extension):
    """Finds equations inside lines."""

    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802
        """Adds the pattern, right after code spans."""
        md.inlinePatterns.register(_Inline(INLINE, md), "equation", _BEFORE_ESCAPES)


def makeExtension(**options: Any) -> Equations:  # noqa: N802
    """Returns the extension: Python-Markdown looks for this name."""
    return Equations(**options)


def block(source: str, _language: str, _css_class: str, _options: Any, _md: Markdown, **_more: Any) -> str:
    """Returns a fenced block as a displayed equation: SuperFences calls it."""
    return f'<div class="equation">{as_mathml(source.strip(), "block")}</div>'
