"""A browser, a server of documents, and a page of it for each test."""

import shutil
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, async_playwright, expect

from tests.observe.page.documents import document
from tests.observe.page.documents_server import START_SECONDS, DocumentsServer
from tests.observe.page.open_page import OpenPage
from tests.servers.polling import PATIENCE_SECONDS

_CHROMIUM = shutil.which("chromium")
_FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser() -> AsyncIterator[Browser]:
    if _CHROMIUM is None:
        pytest.skip("needs Chromium")
    expect.set_options(timeout=1000 * PATIENCE_SECONDS)
    async with async_playwright() as started:
        browser = await started.chromium.launch(executable_path=_CHROMIUM, args=_FLAGS)
        yield browser
        await browser.close()


@pytest_asyncio.fixture(loop_scope="session")
async def documents() -> AsyncIterator[DocumentsServer]:
    """A server with 6 accumulators and 16 workers, one of which is slow, and another one often late or missing."""
    async with DocumentsServer(document(START_SECONDS)) as server:
        yield server


@pytest_asyncio.fixture(loop_scope="session")
async def opened(browser: Browser, documents: DocumentsServer) -> AsyncIterator[OpenPage]:
    """Opens pages, and closes them before the server. None of them may have an error, or ask another server."""
    async with OpenPage(browser) as opened:
        yield opened


@pytest_asyncio.fixture(loop_scope="session")
async def page(opened: OpenPage, documents: DocumentsServer) -> Page:
    """The page of the server, with its first document."""
    return await opened.at(documents.url)
