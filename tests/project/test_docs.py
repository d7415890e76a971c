"""The Python in the documentation runs as printed."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.servers.polling import PATIENCE_SECONDS

DOCS = Path(__file__).parents[2] / "docs"
BLOCKS = {
    f"{page.name}-{number}": block
    for page in sorted(DOCS.glob("*.md"))
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
    if "localhost:50051" in block
}


def run(program: str, address: str) -> str:
    program = program.replace("localhost:50051", address)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("block", list(BLOCKS.values()), ids=list(BLOCKS))
def test_examples_run(server_address: str, block: str) -> None:
    assert run(block, server_address)


def test_the_batch_norm_example_says_what_is_true(server_address: str) -> None:
    printed = run(BLOCKS["fused_batch_norm.md-0"], server_address)
    assert re.search(r"mean of y: -?0\.0", printed)
    assert "scale_backprop: (3,) offset_backprop: (3,)" in printed


def test_the_gru_example_says_what_is_true(server_address: str) -> None:
    printed = run(BLOCKS["gru_block_cell.md-0"], server_address)
    assert printed == "state: (8, 4)\nd_w_ru: (7, 8) d_h of the first state: (8, 4)\n"


def test_the_layer_norm_example_says_what_is_true(server_address: str) -> None:
    printed = run(BLOCKS["layer_norm.md-0"], server_address)
    assert printed == (
        "y: (2, 5, 8) mean: (2, 5) rstd: (2, 5)\n"
        "x_backprop: (2, 5, 8) offset_backprop: [10. 10. 10. 10. 10. 10. 10. 10.]\n"
    )


def test_every_page_is_linked() -> None:
    texts = [page.read_text() for page in (DOCS.parent / "README.md", *DOCS.glob("*.md"))]
    for page in set(DOCS.glob("*.md")) - {DOCS / "index.md"}:
        assert any(f"{page.name})" in text for text in texts), page.name
