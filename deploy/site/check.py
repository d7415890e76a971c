"""Checks the site that was built: links, pictures, its search, and that it asks nothing of other servers.

python -m deploy.site.check build/site
"""

import json
import posixpath
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

_LOADED = {
    ("img", "src"),
    ("script", "src"),
    ("iframe", "src"),
    ("source", "src"),
    ("video", "src"),
    ("object", "data"),
}
_LOADING_LINKS = {
    "stylesheet",
    "icon",
    "preload",
    "prefetch",
    "preconnect",
    "dns-prefetch",
    "manifest",
    "modulepreload",
}
_HEADING = re.compile("h[1-6]")
_SEARCH_INDEX = "search/search_index.json"
_NOT_SEARCHED = ("404.html", "files/")
_CSS_LOAD = re.compile(r"(?:@import\s+(?:url\()?|url\()\s*['\"]?\s*((?:https?:)?//[^'\")\s]+)")


@dataclass
class Page(HTMLParser):
    """The references and anchors of one page.

    Attributes:
        ids: The anchors of the page.
        headings: The anchors of its headings, the title included.
        links: Where its links lead.
        loads: What a browser loads with it.
        pictures_without_text: The pictures that have no alternative text.
    """

    ids: set[str] = field(default_factory=set)
    headings: list[str] = field(default_factory=list)
    links: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)
    pictures_without_text: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Notes what a tag refers to."""
        values = {name: value or "" for name, value in attrs}
        self.ids.update(values[name] for name in ("id", "name") if name in values)
        if _HEADING.fullmatch(tag) and "id" in values:
            self.headings.append(values["id"])
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        self.loads += [values[name] for name in values if (tag, name) in _LOADED]
        self.loads += [part.split()[0] for part in values.get("srcset", "").split(",") if part.strip()]
        if tag == "link" and _LOADING_LINKS & set(values.get("rel", "").split()):
            self.loads.append(values.get("href", ""))
        if tag == "img" and not values.get("alt", "").strip() and values.get("role") != "presentation":
            self.pictures_without_text.append(values.get("src", ""))
        self.loads += _CSS_LOAD.findall(values.get("style", ""))
        if "mermaid" in values.get("class", "").split():
            self.loads.append("https://unpkg.com/mermaid")  # the theme's script fetches it for such an element


def problems_of(site: Path) -> Iterator[str]:
    """Yields a sentence for everything that is wrong with a site."""
    pages = {path.relative_to(site).as_posix(): _read(path) for path in sorted(site.glob("**/*.html"))}
    for name, page in pages.items():
        for picture in page.pictures_without_text:
            yield f"{name}: the picture {picture} has no alternative text"
        for target in page.loads:
            if _is_outside(target):
                yield f"{name}: loads {target} from another server"
            elif problem := _missing(name, target, site, pages):
                yield problem
        for target in page.links:
            if not urlsplit(target).scheme and (problem := _missing(name, target, site, pages)):
                yield problem
    for path in sorted(site.glob("**/*.css")):
        for target in _CSS_LOAD.findall(path.read_text()):
            yield f"{path.relative_to(site)}: loads {target} from another server"
    yield from _not_found_by_search(site, pages)


def _not_found_by_search(site: Path, pages: dict[str, Page]) -> Iterator[str]:
    """Yields a sentence for each heading of a page that is not in the index of the search."""
    if not (site / _SEARCH_INDEX).is_file():
        yield f"there is no {_SEARCH_INDEX}, so nothing can be found"
        return
    places = {entry["location"] for entry in json.loads((site / _SEARCH_INDEX).read_text())["docs"]}
    for name, page in pages.items():
        if not name.startswith(_NOT_SEARCHED):
            for heading in page.headings[1:]:  # the title is found by the page
                if f"{name}#{heading}" not in places:
                    yield f"{name}: the search does not find #{heading}"
            if name not in places and not (name == "index.html" and "" in places):
                yield f"{name}: the search does not find the page"


def _read(path: Path) -> Page:
    page = Page()
    page.feed(path.read_text())
    return page


def _is_outside(target: str) -> bool:
    return bool(urlsplit(target).netloc) or urlsplit(target).scheme not in ("", "data")


def _missing(name: str, target: str, site: Path, pages: dict[str, Page]) -> str:
    """Returns what is wrong with a target inside the site, "" for nothing."""
    parts = urlsplit(target)
    if parts.scheme or target in ("", "."):
        return ""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(name), unquote(parts.path))) if parts.path else name
    if name == "404.html":
        path = path.lstrip("/")
    if (site / path).is_dir():
        path = posixpath.join(path, "index.html").removeprefix("./")
    if not (site / path).is_file():
        return f"{name}: there is no {target}"
    if parts.fragment and path in pages and unquote(parts.fragment) not in pages[path].ids:
        return f"{name}: there is no anchor {target}"
    return ""


def main(site: Path) -> None:
    """Exits with 1, and says what is wrong, if something is."""
    problems = list(problems_of(site))
    sys.exit("\n".join(problems) if problems else 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
