"""The form of a page: short, with a first paragraph that says for whom it is, and in the navigation.

Whether a first paragraph says it well is for readers to judge; that there is one, this finds out.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

MOST_LINES = 120
LONGER = {
    "CHANGELOG.md": "the history, which grows",
    "benchmarks/README.md": "the results of all comparisons",
    "docs/environment_variables.md": "a table of all variables, made by `python -m deploy.tables`",
    "docs/error_codes.md": "a table of all codes, made by `python -m deploy.tables`",
}
"""The pages that may have more lines, and why."""

_FEWEST_WORDS = 12
_NAMED = re.compile(r"^ +- (?:\"[^\"]+\": |[^#:]+: )?(\S+\.md)$", re.MULTILINE)
_NO_PROSE = re.compile(r"[#|>!*+<$`~-]|\d+\. |    ")
"""The beginning of a heading, table, quotation, picture, list, tag, equation or block of code."""
_PROSE = re.compile(r"`[^`]+`|\*\*\w")
"""The beginning of a sentence that looks like one of them."""


@dataclass(frozen=True)
class Page:
    """A page of the site.

    Attributes:
        path: Its path in the repository.
        place: Its place on the site.
        text: Its Markdown.
    """

    path: str
    place: str
    text: str


def named_in(navigation: str) -> list[str]:
    """Returns the places that the navigation in mkdocs.yml names, in its order."""
    return _NAMED.findall(navigation)


def problems_of(page: Page, navigation: str, longer: Mapping[str, str] = LONGER) -> Iterator[str]:
    """Yields a sentence for everything that is wrong with the form of a page.

    Args:
        page: The page.
        navigation: The navigation of the site, as in mkdocs.yml.
        longer: The pages that may be longer than others, and why.
    """
    num_places = named_in(navigation).count(page.place)
    if num_places != 1:
        yield f"{page.path}: expected one place in the navigation of mkdocs.yml, found {num_places}"
    num_lines = len(page.text.splitlines())
    if num_lines > MOST_LINES and page.path not in longer:
        yield f"{page.path}: expected at most {MOST_LINES} lines, found {num_lines}: split it, one task a page"
    if not page.text.startswith("# "):
        yield f"{page.path}: expected a title in the first line"
    elif not _is_prose(first_paragraph(page.text)):
        yield f"{page.path}: expected a paragraph below the title that says for whom the page is"


def first_paragraph(text: str) -> str:
    """Returns what follows the title, up to the next empty line."""
    _title, _, rest = text.partition("\n")
    return rest.lstrip("\n").partition("\n\n")[0]


def _is_prose(paragraph: str) -> bool:
    begins_otherwise = _NO_PROSE.match(paragraph) and not _PROSE.match(paragraph)
    return not begins_otherwise and len(paragraph.split()) >= _FEWEST_WORDS
