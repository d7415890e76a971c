"""The check of the site finds what is wrong with it."""

import json
from pathlib import Path

import pytest

from deploy.site.check import problems_of

GOOD = """<html><head><link rel="stylesheet" href="assets/site.css"></head><body><h1 id="top">One</h1>
<a href="two.html#there">two</a> <a href="#top">up</a> <a href="https://example.com/">elsewhere</a>
<img src="assets/logo.svg" alt="Logo"></body></html>"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    (tmp_path / "assets").mkdir()
    (tmp_path / "assets" / "site.css").write_text("body { background: url(logo.svg) }")
    (tmp_path / "assets" / "logo.svg").write_text("<svg/>")
    (tmp_path / "index.html").write_text(GOOD)
    (tmp_path / "two.html").write_text('<h1 id="two">Two</h1><h2 id="there">There</h2>')
    write_index(tmp_path, "", "two.html", "two.html#there")
    return tmp_path


def write_index(site: Path, *places: str) -> None:
    (site / "search").mkdir(exist_ok=True)
    (site / "search" / "search_index.json").write_text(json.dumps({"docs": [{"location": each} for each in places]}))


def test_nothing_is_wrong(site: Path) -> None:
    assert list(problems_of(site)) == []


@pytest.mark.parametrize(
    ("added", "problem"),
    [
        ('<a href="three.html">', "index.html: there is no three.html"),
        ('<a href="two.html#nowhere">', "index.html: there is no anchor two.html#nowhere"),
        ('<a href="#nowhere">', "index.html: there is no anchor #nowhere"),
        ('<img src="assets/logo.svg">', "index.html: the picture assets/logo.svg has no alternative text"),
        ('<img src="nothing.svg" alt="Nothing">', "index.html: there is no nothing.svg"),
        ('<script src="https://example.com/a.js"></script>', "index.html: loads https://example.com/a.js"),
        ('<img alt="A" src="//example.com/a.png">', "index.html: loads //example.com/a.png from another server"),
        (
            '<img alt="A" src="assets/logo.svg" srcset="https://example.com/2.png 2x">',
            "loads https://example.com/2.png",
        ),
        ('<link rel="preconnect" href="https://fonts.example">', "index.html: loads https://fonts.example"),
        ('<p style="background: url(https://example.com/a.png)">', "index.html: loads https://example.com/a.png"),
        ('<iframe src="http://example.com/"></iframe>', "index.html: loads http://example.com/"),
        ('<pre class="mermaid">', "index.html: loads https://unpkg.com/mermaid"),
    ],
)
def test_a_wrong_page_is_found(site: Path, added: str, problem: str) -> None:
    (site / "index.html").write_text(GOOD.replace("</body>", f"{added}</body>"))
    (found,) = problems_of(site)
    assert problem in found


@pytest.mark.parametrize("css", ["@import url('https://a.example/b.css')", "a { src: url(//a.example/c.woff) }"])
def test_a_style_that_loads_from_elsewhere_is_found(site: Path, css: str) -> None:
    (site / "assets" / "site.css").write_text(css)
    (found,) = problems_of(site)
    assert found.startswith("assets/site.css: loads ")


@pytest.mark.parametrize(
    ("places", "problem"),
    [
        (["", "two.html"], "two.html: the search does not find #there"),
        (["", "two.html#there"], "two.html: the search does not find the page"),
        (["two.html", "two.html#there"], "index.html: the search does not find the page"),
    ],
)
def test_what_the_search_does_not_find_is_found(site: Path, places: list[str], problem: str) -> None:
    write_index(site, *places)
    assert list(problems_of(site)) == [problem]


def test_a_site_without_a_search_is_found(site: Path) -> None:
    (site / "search" / "search_index.json").unlink()
    (found,) = problems_of(site)
    assert "nothing can be found" in found
