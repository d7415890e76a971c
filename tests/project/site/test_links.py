"""Links of pages lead to the same files on the site as on a code host."""

import pytest

from deploy.site.hidden import without_comments
from deploy.site.links import BrokenLinkError, relinked


@pytest.mark.parametrize(
    ("page", "link", "place"),
    [
        ("docs/elastic.md", "pytorch.md#in-a-script", "pytorch.md#in-a-script"),
        ("docs/elastic.md", "../README.md", "index.md"),
        ("docs/elastic.md", "../benchmarks/README.md", "benchmarks.md"),
        ("docs/elastic.md", "../proto/gradserve/v1", "reference/rpc.md"),
        ("docs/elastic.md", "../proto/gradserve/v1/tensor.proto", "reference/rpc.md"),
        ("docs/elastic.md", "../client/gradserve", "reference/python.md"),
        ("docs/elastic.md", "../server/gradserve_server/config/__init__.py", "reference/settings.md"),
        ("docs/elastic.md", "../examples/words_worker.py", "files/examples/words_worker.py.md"),
        ("docs/elastic.md", "../examples/cpp", "files/examples/cpp/index.md"),
        ("docs/elastic.md", "../LICENSE", "files/LICENSE"),
        ("benchmarks/README.md", "../docs/targets.svg", "targets.svg"),
        ("CONTRIBUTING.md", "docs/testing.md", "testing.md"),
        ("docs/elastic.md", "#here", "#here"),
        ("docs/elastic.md", "https://example.com/a.md", "https://example.com/a.md"),
        ("docs/elastic.md", "mailto:a@example.com", "mailto:a@example.com"),
    ],
)
def test_a_link_leads_to_the_place_of_its_file(page: str, link: str, place: str) -> None:
    text, _targets = relinked(f"see [this]({link}) and ![that]({link})\n", page)
    assert text == f"see [this]({place}) and ![that]({place})\n"


def test_links_in_code_stay() -> None:
    text = "```python\na[0](nowhere)\n```\n"
    assert relinked(text, "docs/elastic.md") == (text, set())


def test_a_link_that_leads_nowhere_is_an_error() -> None:
    with pytest.raises(
        BrokenLinkError, match=r"docs/elastic\.md links to nowhere\.md, but there is no docs/nowhere\.md"
    ):
        relinked("[there](nowhere.md)", "docs/elastic.md")


def test_comments_about_tests_are_not_on_the_site() -> None:
    text = "text\n\n<!-- setup:\nx = 1\n-->\n<!-- prints: 1 -->\n\n```python\nprint(x)\n```\n\n<!-- another -->\n"
    assert without_comments(text) == "text\n\n```python\nprint(x)\n```\n\n<!-- another -->\n"
