"""The navigation of the site names every page once. `make docs` checks the rest, but this takes no time."""

import re
from collections import Counter

from deploy.site.places import ROOT, is_page, place_of, tracked

_NAMED = re.compile(r"^ +- (?:[^#:]+: )?(\S+\.md)$", re.MULTILINE)
_GENERATED = ("reference/", "performance.md")


def test_every_page_is_in_the_navigation_once() -> None:
    _, _, navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")
    named = Counter(_NAMED.findall(navigation))
    written = Counter(place for place in named.elements() if not place.startswith(_GENERATED))
    assert written == Counter(place_of(path) for path in tracked() if is_page(path))


def test_every_page_is_linked_from_another() -> None:
    docs = ROOT / "docs"
    texts = [page.read_text() for page in (ROOT / "README.md", *docs.glob("**/*.md"))]
    for page in set(docs.glob("**/*.md")) - {docs / "index.md"}:
        assert any(re.search(rf"\b{page.name}[)#]", text) for text in texts), page.name
