"""A real server for tests, on a free port of this machine."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any, Self, TypeVar

from gradserve_server.app import Server
from gradserve_server.config import ServerConfig
from gradserve_server.parts import Parts
from gradserve_server.runtime.event_loop import new_event_loop

T = TypeVar("T")

_START_SECONDS = 120.0


class LocalServer:
    """Runs a server in a thread of this process, until the end of the block.

    with LocalServer() as local, gradserve.connect(local.address) as client:
        ...
    """

    def __init__(
        self, config: ServerConfig | None = None, parts: Parts | None = None, *, address: str = "127.0.0.1:0"
    ) -> None:
        base = config if config is not None else ServerConfig()
        listen = base.listen.model_copy(update={"listen": (address,), "address_file": None})
        self._config = base.model_copy(update={"listen": listen})
        self._parts = parts
        self._thread = threading.Thread(target=self._run, name="gradserve-local-server")
        self._ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._server: Server | None = None
        self._failure: BaseException | None = None

    @property
    def address(self) -> str:
        """The address of the server."""
        return self.server.addresses[0]

    @property
    def server(self) -> Server:
        """The server itself, which only `inspect` may use."""
        if self._server is None:
            raise RuntimeError("the server is not running")
        return self._server

    def inspect(self, look: Callable[[Server], T]) -> T:
        """Returns the result of `look`, called on the server's own event loop."""

        async def on_loop() -> T:
            return look(self.server)

        if self._loop is None:
            raise RuntimeError("the server is not running")
        return asyncio.run_coroutine_threadsafe(on_loop(), self._loop).result(_START_SECONDS)

    def wait_until_prepared(self) -> None:
        """Waits until the kernels of the ops are loaded or compiled, however long that takes.

        From then on, equal calls give equal bits.
        """
        self.inspect(lambda server: server.runner.prepare())
        self.server.runner.join()

    def __enter__(self) -> Self:
        self._thread.start()
        if not self._ready.wait(_START_SECONDS):
            raise TimeoutError(f"the server did not start within {_START_SECONDS} s")
        if self._failure is not None:
            raise RuntimeError("the server did not start") from self._failure
        return self

    def __exit__(self, *exception: object) -> None:
        if self._loop is not None and self._stop is not None:
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=new_event_loop) as runner:
                runner.run(self._serve())
        except BaseException as error:
            self._failure = error
            self._ready.set()

    async def _serve(self) -> Any:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        async with Server(self._config, self._parts) as server:
            self._server = server
            self._ready.set()
            await self._stop.wait()
        # So that none of its threads disturbs what this process does next.
        await asyncio.to_thread(server.join)
