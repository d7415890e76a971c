"""The copy buttons of the site: what a console's button copies can be pasted into a shell."""

import pytest
from playwright.async_api import Page

from deploy.site.places import ROOT
from tests.observe.page.conftest import browser, documents, opened, page

__all__ = ["browser", "documents", "opened", "page"]

pytestmark = pytest.mark.asyncio(loop_scope="session")

_PROGRAM = (ROOT / "deploy/site/assets/site.js").read_text()


_PROMPT, _MORE = '<span class="gp">$ </span>', '<span class="gp">&gt; </span>'


@pytest.mark.parametrize(
    ("code", "copied"),
    [
        (
            f'{_PROMPT}pip install .\n{_PROMPT}gradserve health\n<span class="go">localhost:50051: SERVING</span>\n',
            "pip install .\ngradserve health",
        ),
        (f'{_PROMPT}docker run <span class="se">\\\n</span>{_MORE}  gradserve\n', "docker run \\\n  gradserve"),
        ("make docs\n", None),
        ('<span class="n">x</span> = 1\nprint(x)\n', None),
    ],
    ids=["a console", "a command of two lines", "a script", "Python"],
)
async def test_commands_are_copied_without_prompts_and_output(page: Page, code: str, copied: str | None) -> None:
    found = await page.evaluate(
        """([code, program]) => {
            const box = document.createElement("div");
            box.innerHTML = `<pre id="copied"><code>${code}</code></pre>
                <button data-clipboard-target="#copied > code">Copy</button>`;
            document.body.append(box);
            new Function(program)();
            const button = box.querySelector("button");
            button.click();
            return button.dataset.clipboardText ?? null;
        }""",
        [code, _PROGRAM],
    )
    assert found == copied
