"""Every page is in the navigation once, short, and says first for whom it is. `make docs` checks what takes longer."""

import re
from collections import Counter

import pytest

from deploy.site.form import LONGER, MOST_LINES, Page, named_in, problems_of
from deploy.site.places import ROOT, is_page, place_of, tracked

PARTS = ["Learn", "Train", "Operate", "Understand", "Reference"]
_GENERATED = ("reference/", "performance.md")

GOOD = "# Feed the cat\n\nYou have a cat, and it is hungry: this is how you feed it, in less than a minute.\n"
NAVIGATION = "\nnav:\n  - Learn:\n      - Cats:\n          - Feed the cat: cat.md\n"


def navigation() -> str:
    return (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]


def pages() -> list[Page]:
    return [Page(path, place_of(path), (ROOT / path).read_text()) for path in sorted(tracked()) if is_page(path)]


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.path)
def test_a_page_is_in_the_navigation_short_and_says_for_whom_it_is(page: Page) -> None:
    assert list(problems_of(page, navigation())) == []


def test_the_navigation_has_five_parts_and_names_no_other_pages() -> None:
    assert re.findall(r"^  - (\w+):$", navigation(), re.MULTILINE) == PARTS
    written = Counter(place for place in named_in(navigation()) if not place.startswith(_GENERATED))
    assert written == Counter(page.place for page in pages())


def test_a_page_that_may_be_longer_exists() -> None:
    assert LONGER.keys() <= {page.path for page in pages()}


def test_every_page_is_linked_from_another() -> None:
    docs = ROOT / "docs"
    texts = {page: page.read_text() for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *docs.glob("**/*.md"))}
    for page in set(docs.glob("**/*.md")) - {docs / "index.md"}:
        others = (text for other, text in texts.items() if other != page)
        assert any(re.search(rf"\b{page.name}[)#]", text) for text in others), page.name


def test_nothing_is_wrong_with_a_good_page() -> None:
    assert list(problems_of(Page("docs/cat.md", "cat.md", GOOD), NAVIGATION)) == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (GOOD + "line\n" * MOST_LINES, "expected at most 120 lines, found 123"),
        ("# Feed the cat\n\n## Food\n\nGive it some.\n", "expected a paragraph below the title"),
        ("# Feed the cat\n\n| food | bowl |\n|---|---|\n", "expected a paragraph below the title"),
        (
            "# Feed the cat\n\n```console\n$ feed cat with fish and milk and then with more fish and milk\n```\n",
            "expected",
        ),
        ("# Feed the cat\n\n* one\n* two\n", "expected a paragraph below the title"),
        ("# Feed the cat\n\n<!-- for cats and for those who have cats and for all who feed them -->\n", "a paragraph"),
        ("# Feed the cat\n\nGive it food.\n", "expected a paragraph below the title"),
        ("You have a cat.\n", "expected a title in the first line"),
    ],
)
def test_a_page_of_another_form_is_found(text: str, problem: str) -> None:
    (found,) = problems_of(Page("docs/cat.md", "cat.md", text), NAVIGATION)
    assert found.startswith("docs/cat.md: ")
    assert problem in found


@pytest.mark.parametrize("nav", ["", NAVIGATION + "          - Feed it again: cat.md\n"])
def test_a_page_that_is_not_in_the_navigation_once_is_found(nav: str) -> None:
    (found,) = problems_of(Page("docs/cat.md", "cat.md", GOOD), nav)
    assert "expected one place in the navigation" in found
