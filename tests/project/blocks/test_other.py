"""Blocks that are neither Python nor commands: each language has its test, and there is no other language."""

import getpass
import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from deploy.site.equations import as_mathml
from deploy.site.places import ROOT, tracked
from gradserve_server.config.settings import Setting, make_config
from gradserve_server.security.access_file import read_policy
from tests.project.blocks.reading import Block, all_blocks, blocks_in, pages, read_blocks

_INPUT = re.compile(r"^(\$|import|from|docker|git|gradserve|kubectl|make|pip|python) \S", re.MULTILINE)
FRAGMENT = "a fragment of a file of the reader's"


def excerpts_of(*suffixes: str) -> Callable[[Block], None]:
    """Returns a test that a block is in a file of the repository, word for word."""

    def check(block: Block) -> None:
        if block.said.get("not run") == FRAGMENT:
            return
        wanted = squeezed(block.text)
        files = (ROOT / path for path in tracked() if path.endswith(suffixes))
        assert any(wanted in squeezed(file.read_text()) for file in files), f"no file has all of {block}"

    return check


def squeezed(text: str) -> str:
    """Returns a text without the indentation of its lines."""
    return "\n".join(line.strip() for line in text.strip().splitlines())


def is_output(block: Block) -> None:
    assert not _INPUT.search(block.text), "name the language of this block"


def has_a_test_elsewhere(_block: Block) -> None:
    """test_python and test_commands test them, and the test of TOML below."""


def is_converted(block: Block) -> None:
    as_mathml(block.text, "block")


KINDS: dict[str, Callable[[Block], None]] = {
    "": is_output,
    "bash": has_a_test_elsewhere,
    "console": has_a_test_elsewhere,
    "cpp": excerpts_of(".cpp", ".h"),
    "js": excerpts_of(".js"),
    "json": is_output,
    "math": is_converted,
    "proto": excerpts_of(".proto"),
    "python": has_a_test_elsewhere,
    "sh": has_a_test_elsewhere,
    "text": is_output,
    "toml": has_a_test_elsewhere,
    "yaml": excerpts_of(".yaml", ".yml"),
}


@pytest.mark.parametrize("block", [block for page in pages() for block in read_blocks(page)], ids=str)
def test_block_is_of_a_kind_that_is_tested(block: Block) -> None:
    assert block.language in KINDS, f"there is no test of {block.language} in tests/project/blocks"
    KINDS[block.language](block)


@pytest.mark.parametrize("page", sorted({block.page for block in all_blocks("toml")}))
def test_toml_of_a_page_is_a_file_that_servers_take(page: str, tmp_path: Path) -> None:
    text = "\n".join(block.text for block in read_blocks(page) if block.language == "toml")
    content = tomllib.loads(text)
    if content.keys() & {"identities", "containers"}:
        text = re.sub(r"sha256:(\w{4})\.\.\.", lambda match: "sha256:" + 16 * match[1], text)
        file = tmp_path / "access.toml"
        file.write_text(text.replace('"alice"', f'"{getpass.getuser()}"'))
        read_policy(file)
    else:
        make_config({name: Setting(value, f"{page}: {name}") for name, value in content.items()})


def test_comments_are_read() -> None:
    (block,) = blocks_in(
        "text\n\n  <!-- workers: 2 -->\n  <!-- setup:\n  x = 1\n  if x:\n      y = 2\n  -->\n\n"
        "  ```python\n  x\n  ```\n",
        "page.md",
    )
    assert (block.line, block.language, block.text) == (11, "python", "x\n")
    assert block.said == {"workers": "2", "setup": "x = 1\nif x:\n    y = 2"}


@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("yaml", "no: such\nfile: here\n"),
        ("js", "const nowhere = 1;\n"),
        ("", "import numpy\n"),
        ("text", "$ gradserve serve\n"),
    ],
)
def test_an_untested_block_is_found(language: str, text: str) -> None:
    with pytest.raises(AssertionError):
        KINDS[language](Block("page.md", 1, language, text))
