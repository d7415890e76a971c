"""Pages in a browser, and what went wrong in them."""

from types import TracebackType
from typing import Literal, Self
from urllib.parse import urlsplit

from playwright.async_api import Browser, BrowserContext, ConsoleMessage, Page, Request

from tests.servers.polling import PATIENCE_SECONDS

DESKTOP = (1440, 1000)
PHONE = (390, 844)


class OpenPage:
    """Opens pages until the end of the block; then checks that all went well in them.

    Attributes:
        expected: Parts of messages on the console that a test expects, such as those about a server that is gone.
    """

    def __init__(self, browser: Browser) -> None:
        self.expected: tuple[str, ...] = ()
        self._browser = browser
        self._contexts: list[BrowserContext] = []
        self._messages: list[str] = []
        self._hosts: set[str] = set()
        self._host = ""
        self._network_has_changed = False

    async def at(
        self,
        url: str,
        *,
        size: tuple[int, int] = DESKTOP,
        scheme: Literal["light", "dark"] = "light",
        shown: str = "#timeline svg",
    ) -> Page:
        """Opens a page in a context of its own, and returns it when something is to be seen."""
        width, height = size
        context = await self._browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme, device_scale_factor=1
        )
        self._contexts.append(context)
        context.set_default_timeout(1000 * PATIENCE_SECONDS)
        page = await context.new_page()
        page.on("console", self._note)
        page.on("pageerror", lambda error: self._messages.append(str(error)))
        page.on("request", self._asked)
        self._host = urlsplit(url).netloc
        self._network_has_changed = False
        await page.goto(url)
        while self._network_has_changed:
            self._network_has_changed = False
            await page.reload()
        await page.locator(shown).wait_for()
        return page

    def _note(self, message: ConsoleMessage) -> None:
        if "net::ERR_NETWORK_CHANGED" in message.text:
            # Tests of networks make interfaces, and the browser then gives up whatever it is loading.
            self._network_has_changed = True
            return
        self._messages.append(f"{message.type}: {message.text}")

    def _asked(self, request: Request) -> None:
        if not request.url.startswith("data:"):
            self._hosts.add(urlsplit(request.url).netloc)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        for context in self._contexts:
            await context.close()
        if kind is None:
            unexpected = [each for each in self._messages if not any(part in each for part in self.expected)]
            assert not unexpected, unexpected
            assert self._hosts == {self._host}
