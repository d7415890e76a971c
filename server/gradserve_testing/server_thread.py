"""Servers in threads of this process: one with faults by name, for users, and a plain one for our own tests."""

import asyncio
import contextlib
import difflib
import random
import threading
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar, Self, TypeAlias, TypeVar

from google.protobuf.descriptor import MethodDescriptor
from pydantic import ValidationError

from gradserve_protocol.errors import GradserveError, InternalError, InvalidArgumentError
from gradserve_server import errors
from gradserve_server.app import Server
from gradserve_server.config import ServerConfig
from gradserve_server.parts import MakeListener, Parts
from gradserve_server.rpc.boundary.chain import Call, Handle
from gradserve_server.rpc.listeners.grpc.listener import GrpcListener
from gradserve_server.rpc.services import SERVICES
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
            with contextlib.suppress(RuntimeError):  # the loop is closed: the server has stopped before
                self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        if self._failure is not None:
            raise RuntimeError("the server ended with an error") from self._failure

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


_Happen: TypeAlias = Callable[[Handle, Any, Call], Awaitable[Any]]
_METHODS: dict[str, MethodDescriptor] = {method.name: method for service in SERVICES for method in service.methods}
_IDS = {"request_id", "forward_id"}


class Fault:
    """A fault that was planted.

    Attributes:
        happened: The methods of the calls that it was done to, in order.
    """

    def __init__(self, concerns: Callable[[MethodDescriptor, Any], bool], happen: _Happen, times: int | None) -> None:
        self.happened: list[str] = []
        self._concerns = concerns
        self._happen = happen
        self._times = times

    def is_due(self, method: MethodDescriptor, request: Any) -> bool:
        """True if it is to be done to a call."""
        is_left = self._times is None or len(self.happened) < self._times
        return is_left and self._concerns(method, request)

    def do(self, method: MethodDescriptor, handle: Handle) -> Handle:
        """Returns a handle that does it to a call."""
        self.happened.append(method.name)

        def faulty(request: Any, call: Call) -> Awaitable[Any]:
            return self._happen(handle, request, call)

        return faulty


class Faults:
    """The faults of one server. Safe to use from any thread, while the server serves.

    Each method plants a fault and returns it; the fault tells what it was done to. The server's methods have the names
    that they have in the protos: "ApplyGradient", "TakeGradient", "PushPull", "BatchNormForward".
    """

    def __init__(self) -> None:
        """Begins without faults."""
        self._planted: list[Fault] = []
        self._lock = threading.Lock()

    def fail_at(self, worker: str, step: int, *, error: type[GradserveError] = InternalError) -> Fault:
        """Fails a worker: its gradient or update of a step is not counted, and its call raises an error.

        Only its next call with one of that step fails.

        Args:
            worker: Its `worker_id`.
            step: The `local_step` of the gradient or update.
            error: What the call raises. Clients repeat a call by themselves after UnavailableError.
        """

        async def fail(_handle: Handle, _request: Any, _call: Call) -> None:
            raise raised(f"fail_at({worker!r}, {step})")

        def concerns(method: MethodDescriptor, request: Any) -> bool:
            return (
                method.name in {"ApplyGradient", "PushPull", "Push", "PushPullParameters"}
                and (request.worker_id, request.local_step) == (worker, step)
            )  # fmt: skip

        raised: type[errors.ServiceError] = getattr(errors, error.__name__, errors.InternalError)
        return self._plant(Fault(concerns, fail, times=1))

    def drop_reply(self, *methods: str, times: int | None = 1, probability: float = 1.0, seed: int = 0) -> Fault:
        """Drops replies: calls are carried out, and their clients learn only that they failed (UnavailableError).

        Args:
            methods: The methods; none for all.
            times: How many replies are dropped; None for no end.
            probability: The share of replies that are dropped until then.
            seed: The seed of the random choice.
        """
        chosen = random.Random(seed)

        async def drop(handle: Handle, request: Any, call: Call) -> None:
            await handle(request, call)
            raise errors.UnavailableError("the reply was dropped")

        named = _named(methods)
        return self._plant(Fault(lambda method, _: method.name in named and chosen.random() < probability, drop, times))

    def delay(self, seconds: float, *methods: str, times: int | None = 1) -> Fault:
        """Delays calls before they are carried out.

        Args:
            seconds: By how much.
            methods: The methods; none for all.
            times: How many calls are delayed; None for no end.
        """

        async def wait(handle: Handle, request: Any, call: Call) -> Any:
            await asyncio.sleep(seconds)
            return await handle(request, call)

        named = _named(methods)
        return self._plant(Fault(lambda method, _: method.name in named, wait, times))

    def duplicate(self, *methods: str, times: int | None = 1) -> Fault:
        """Carries calls out twice, as if the network had repeated them; the client gets the second reply.

        Args:
            methods: The methods, which must be ones that count once: their requests have an id. None for all of these.
            times: How many calls are repeated; None for no end.

        Raises:
            InvalidArgumentError: The requests of a method have no id.
        """
        named = _named(methods) if methods else {name for name in _METHODS if _has_id(name)}
        for name in sorted(named):
            if not _has_id(name):
                raise InvalidArgumentError(f"expected methods whose requests have an id, got {name!r}")

        async def repeat(handle: Handle, request: Any, call: Call) -> Any:
            await handle(request, call)
            return await handle(request, call)

        return self._plant(Fault(lambda method, _: method.name in named, repeat, times))

    def clear(self) -> None:
        """Removes all faults: from now on the server does not fail."""
        with self._lock:
            self._planted.clear()

    def around(self, method: MethodDescriptor, handle: Handle) -> Handle:
        """Returns a handle that does the faults that are due to a method's calls: this is an interceptor."""

        def faulty(request: Any, call: Call) -> Awaitable[Any]:
            due = handle
            with self._lock:
                for fault in self._planted:
                    if fault.is_due(method, request):
                        due = fault.do(method, due)
            return due(request, call)

        return faulty

    def _plant(self, fault: Fault) -> Fault:
        with self._lock:
            self._planted.append(fault)
        return fault


class ServerThread:
    """Runs a real server in a thread of this process, on a free port, until the end of the block.

    with ServerThread(max_bytes="64MiB") as server, gradserve.connect(server.address) as client:
        server.faults.fail_at("worker-1", step=3)

    Attributes:
        faults: The faults of this server; none until some are planted.
    """

    _make_listener: ClassVar[MakeListener] = GrpcListener

    def __init__(self, **settings: Any) -> None:
        """Makes a server, which starts with the block.

        Args:
            **settings: The settings of `gradserve serve`, by their names in the TOML file: `max_bytes="64MiB"`,
                `state_dir=tmp_path`. Kernels are loaded from the first op on, unless `warm_up=True`.
                There is no HTTP port, unless `http_listen="auto"`.

        Raises:
            InvalidArgumentError: There is no such setting, or its value is not valid.
        """
        self.faults = Faults()
        config = _configuration({"warm_up": False, "http_listen": "off", **settings})
        self._local = LocalServer(config, Parts(interceptors=(self.faults,), make_listener=self._make_listener))

    @property
    def address(self) -> str:
        """The address on which it listens: "127.0.0.1:PORT"."""
        return self._local.address

    def __enter__(self) -> Self:
        self._local.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._local.__exit__(*exception)


def _configuration(settings: dict[str, Any]) -> ServerConfig:
    sections = {
        name: section
        for section, concern in ServerConfig.model_fields.items()
        if concern.annotation is not None
        for name in concern.annotation.model_fields
        if name not in ("listen", "address_file")  # it listens on a free port
    }
    nested: dict[str, dict[str, Any]] = {}
    for name, value in settings.items():
        if name not in sections:
            close = difflib.get_close_matches(name, sections, 1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise InvalidArgumentError(f"expected settings of `gradserve serve`, got {name!r}{hint}")
        nested.setdefault(sections[name], {})[name] = str(value) if name.endswith("_dir") else value
    try:
        return ServerConfig.model_validate(nested)
    except ValidationError as error:
        first = error.errors()[0]
        text = getattr(first.get("ctx", {}).get("error"), "message", first["msg"])
        raise InvalidArgumentError(f"{first['loc'][-1]}: {text}, got {first['input']!r}") from None


def _named(methods: tuple[str, ...]) -> set[str]:
    for name in methods:
        if name not in _METHODS:
            raise InvalidArgumentError(f"expected methods of the server such as 'PushPull', got {name!r}")
    return set(methods or _METHODS)


def _has_id(method: str) -> bool:
    return not _IDS.isdisjoint(_METHODS[method].input_type.fields_by_name)
