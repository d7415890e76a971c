"""How people use the status page: with a keyboard, with a token, and when the server is gone."""

import logging
from dataclasses import replace
from typing import Literal

import pytest
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Page, expect

from gradserve_protocol.server_status import PastRun
from gradserve_server.observe.status.snapshot import Order
from tests.observe.page.documents import document
from tests.observe.page.documents_server import START_SECONDS, DocumentsServer
from tests.observe.page.open_page import DESKTOP, PHONE, OpenPage
from tests.servers.polling import eventually_async

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def violations(page: Page) -> str:
    """Returns what is wrong for people who cannot see well or use no mouse."""
    found = await Axe().run(page)
    return found.generate_report() if found.violations_count else ""


@pytest.mark.parametrize(("size", "scheme"), [(DESKTOP, "light"), (DESKTOP, "dark"), (PHONE, "dark")])
async def test_everybody_can_read_it(
    opened: OpenPage, documents: DocumentsServer, size: tuple[int, int], scheme: Literal["light", "dark"]
) -> None:
    ended = PastRun("parameters", "default", "llm", "1", 1.7e9, 1.7e9 + 60, 1200, {"loss": 0.25}, "deleted")
    documents.document = replace(document(START_SECONDS), past_runs=(ended,))
    documents.logs.handle(
        logging.LogRecord("gradserve_server.x", logging.ERROR, __file__, 1, "a disk is full", (), None)
    )
    page = await opened.at(documents.url, size=size, scheme=scheme)
    for part in ("rounds-details", "past", "log"):
        await page.locator(f"#{part} > summary").click()
    for rows in ("past-runs", "log-lines"):
        await expect(page.locator(f"#{rows} tbody tr")).to_have_count(1)
    assert await violations(page) == ""


async def test_keys_are_enough(page: Page) -> None:
    await page.keyboard.press("/")
    await expect(page.locator("#filter")).to_be_focused()
    await page.get_by_role("button", name="resnet50/gradients").focus()
    await page.keyboard.press("ArrowDown")
    await page.keyboard.press("ArrowDown")
    await page.keyboard.press("Enter")
    await expect(page.locator("#detail-title")).to_have_text("resnet50/batch-norm")
    await expect(page.get_by_role("button", name="resnet50/batch-norm")).to_be_focused()
    await page.keyboard.press("p")
    await expect(page.locator("#pause")).to_have_text("Resume")
    await expect(page.locator("#connection")).to_have_text("Paused")


async def test_the_server_sorts_and_filters(page: Page, documents: DocumentsServer) -> None:
    await page.get_by_role("button", name="Size").click()
    await expect(page.locator("th[data-order=bytes]")).to_have_attribute("aria-sort", "descending")
    await page.locator("#filter").fill("NORM")
    await expect(page.locator("#accumulators tbody tr")).to_have_count(1)
    await expect(page.locator("#list-count")).to_have_text("1")
    assert any((each.order, each.name_contains) == (Order.BYTES, "NORM") for each in documents.requests)
    await page.locator("#filter").fill("nothing like it")
    await expect(page.locator("#list-empty")).to_have_text("No accumulator has “nothing like it” in its name.")


async def test_tables_are_sorted_by_the_chosen_column(page: Page) -> None:
    names = page.locator("#methods tbody th")
    await page.locator("#methods").get_by_role("button", name="Failed").click()
    await expect(names.first).to_have_text("TakeGradient")
    await page.locator("#methods").get_by_role("button", name="Method").click()
    await expect(names.first).to_have_text("ApplyGradient")
    await page.locator("#methods").get_by_role("button", name="Method").click()
    await expect(names.first).to_have_text("TakeGradient")


async def test_the_address_keeps_what_is_shown(opened: OpenPage, page: Page) -> None:
    await page.get_by_role("button", name="embedding/rows").click()
    await page.get_by_role("button", name="Waiting").click()
    again = await opened.at(page.url)
    await expect(again.locator("#detail-title")).to_have_text("embedding/rows")
    await expect(again.locator("th[data-order=waiting]")).to_have_attribute("aria-sort", "descending")


async def test_a_lost_connection_is_said_and_comes_back(
    opened: OpenPage, page: Page, documents: DocumentsServer
) -> None:
    opened.expected = ("net::ERR_",)
    await documents.stop()
    await expect(page.locator("#lost-text")).to_contain_text("What you see is no longer live: ")
    await expect(page.locator("#connection")).to_have_text("No connection")
    assert await violations(page) == ""
    documents.start()
    await page.locator("#retry").dispatch_event("click")  # also if the page has just come back by itself
    await expect(page.locator("#connection")).to_have_text("Live")
    await expect(page.locator("#lost")).to_be_hidden()


async def test_a_server_that_is_silent_is_lost_too(page: Page, documents: DocumentsServer) -> None:
    await page.clock.install()
    await page.locator("#filter").fill("norm")  # which makes a new connection
    await page.clock.run_for(300)
    await expect(page.locator("#accumulators tbody tr")).to_have_count(1)
    documents.talks.clear()
    await page.clock.run_for(11_000)
    await expect(page.locator("#lost-text")).to_contain_text("nothing came from the server for a while")
    documents.talks.set()
    await page.clock.run_for(11_000)
    await expect(page.locator("#connection")).to_have_text("Live")


async def test_a_pause_keeps_what_is_seen(opened: OpenPage, documents: DocumentsServer) -> None:
    documents.document = lambda time: document(START_SECONDS + time)
    page = await opened.at(documents.url)
    await page.locator("#pause").click()
    seen = await page.locator("#content").inner_text()
    before = len(documents.requests)
    await eventually_async(documents.num_requests, lambda number: number >= before + 2)
    assert await page.locator("#content").inner_text() == seen
    await page.locator("#pause").click()
    await expect(page.locator("#content")).not_to_have_text(seen)


async def test_a_token_is_asked_for_and_kept_in_the_tab(opened: OpenPage, documents: DocumentsServer) -> None:
    opened.expected = ("401",)
    await documents.stop()
    documents.token = "the-right-one"
    documents.start()
    page = await opened.at(documents.url, shown="#token-value")
    await expect(page.locator("#token-value")).to_be_focused()
    assert await violations(page) == ""
    await page.keyboard.type("a-wrong-one")
    await page.keyboard.press("Enter")
    await expect(page.locator("#token-error")).to_have_text("That did not work: the token is not one of this server's.")
    await page.keyboard.type("the-right-one")
    await page.keyboard.press("Enter")
    await expect(page.locator("#connection")).to_have_text("Live")
    assert await page.evaluate("[sessionStorage.length, localStorage.length, document.cookie]") == [1, 0, ""]
    await page.reload()
    await expect(page.locator("#connection")).to_have_text("Live")
    await page.locator("#forget").click()
    await expect(page.locator("#token-value")).to_be_focused()
    assert await page.evaluate("sessionStorage.length") == 0
