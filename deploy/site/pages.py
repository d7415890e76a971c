"""Assembles the pages of the site from the files of the repository."""

import posixpath
import shutil
from collections.abc import Iterable
from pathlib import Path

from deploy.site.hidden import without_comments
from deploy.site.links import files_below, relinked
from deploy.site.places import ROOT, has_reference, is_page, is_shown, place_of, tracked

_LANGUAGES = {".cc": "cpp", ".js": "javascript", ".py": "python", ".sh": "bash", ".yml": "yaml"}
_LANDING = "---\ntemplate: home.html\nhide:\n  - navigation\n  - toc\n---\n\n"
_NOT_SEARCHED = "---\nsearch:\n  exclude: true\n---\n\n"
_HEADS = {"docs/index.md": _LANDING, "docs/glossary.md": "---\nsearch:\n  boost: 100\n---\n\n"}
"""The heads of single pages, by path; with its own, the search finds the words of the glossary first."""


def write_pages(folder: Path, also: Iterable[str] = ()) -> None:
    """Writes every page whose text is in the repository, and the files to which they link.

    Args:
        folder: Where MkDocs looks for pages. Links between them are relative, and those to other files of the
            repository lead to copies below `files/`, so the site needs no code host.
        also: Further files to which pages link.

    Raises:
        BrokenLinkError: A link leads nowhere.
    """
    files = tracked()
    waiting, written = {*filter(is_page, files), *also}, {"README.md"}
    while waiting:
        path = waiting.pop()
        written.add(path)
        if not has_reference(path):
            waiting |= set(_write_file(folder, path, files)) - written


def _write_file(folder: Path, path: str, files: frozenset[str]) -> Iterable[str]:
    """Writes what the site has of a file or a folder; returns the files to which that links."""
    place = folder / place_of(path)
    if (ROOT / path).is_dir():
        below = files_below(path, files)
        _write(place, _listing(path, below))
        return below
    if path.endswith(".md"):
        text, targets = relinked(without_comments((ROOT / path).read_text()), path)
        head = _HEADS.get(path, "" if is_page(path) else _NOT_SEARCHED)
        _write(place, head + text)
        return targets
    if is_shown(path):
        _write(place, _shown(path))
    else:
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / path, place)
    return ()


def _listing(path: str, contents: Iterable[str]) -> str:
    here = posixpath.dirname(place_of(path))
    lines = (f"* [{name.removeprefix(path + '/')}]({posixpath.relpath(place_of(name), here)})\n" for name in contents)
    return f"{_NOT_SEARCHED}# {path}\n\nFiles of the repository:\n\n{''.join(lines)}"


def _shown(path: str) -> str:
    suffix = Path(path).suffix
    text = (ROOT / path).read_text().rstrip()
    return f"{_NOT_SEARCHED}# {path}\n\n````{_LANGUAGES.get(suffix, suffix[1:])}\n{text}\n````\n"


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
