"""Texts from elsewhere, such as names and ids, as terminals and logs may show them."""

import re

_INVISIBLE = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)
"""Characters that Python takes for printable although nothing is seen of them."""


def visible(text: str) -> str:
    r"""Returns a text in one line that does nothing to a terminal, and in which everything can be seen.

    What is not printable becomes an escape, as in Python: \x1b, \n, \u202e. That is control characters, those that
    change the direction of text, those without a width, and all spaces and line breaks but the ordinary space.
    """
    if text.isprintable() and not _INVISIBLE.search(text):
        return text
    return "".join(
        each if each.isprintable() and not _INVISIBLE.match(each) else each.encode("unicode_escape").decode()
        for each in text
    )


def visible_lines(text: str) -> str:
    """Returns a text of several lines, each as `visible` does; all but the first are indented."""
    return "\n  ".join(map(visible, text.split("\n")))
