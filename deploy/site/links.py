"""Points the links of a page to where their targets are on the site."""

import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from deploy.site.places import ROOT, place_of

_LINK = re.compile(r"(?<=\]\()(?!\w+:|#|//)([^)\s#]+)")
_FENCE = re.compile(r" *(`{3,}|~{3,})")


class BrokenLinkError(Exception):
    """A page links to a file that the repository does not have."""


def relinked(text: str, path: str) -> tuple[str, set[str]]:
    """Returns the text of a page with its links pointing to places on the site, and the files they lead to.

    Args:
        text: Markdown, with links relative to the page, as code hosts follow them.
        path: The page's path in the repository.

    Raises:
        BrokenLinkError: A link leads nowhere.
    """
    targets: set[str] = set()

    def replace(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), match[1]))
        if not (ROOT / target).exists():
            raise BrokenLinkError(f"{path} links to {match[1]}, but there is no {target}")
        targets.add(target)
        return posixpath.relpath(place_of(target), posixpath.dirname(place_of(path)) or ".")

    return outside_code(text, lambda line: _LINK.sub(replace, line)), targets


def outside_code(text: str, change: Callable[[str], str]) -> str:
    """Returns Markdown with each line changed that is not in a fenced block."""
    return "".join(line if in_code else change(line) for line, in_code in _lines(text))


def _lines(text: str) -> Iterator[tuple[str, bool]]:
    """Yields each line, and whether it belongs to a fenced block."""
    fence = ""
    for line in text.splitlines(keepends=True):
        found = _FENCE.match(line)
        if fence:
            yield line, True
            if found and found[1].startswith(fence) and not line.strip().strip(fence[0]):
                fence = ""
        else:
            fence = found[1] if found else ""
            yield line, bool(fence)


def files_below(folder: str, tracked: frozenset[str]) -> list[str]:
    """Returns the files of a folder of the repository, sorted."""
    return sorted(path for path in tracked if path.startswith(f"{folder}/") and not Path(path).name.startswith("."))
