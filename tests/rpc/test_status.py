"""Errors keep their meaning from the domain of the server to the exception of the client."""

import asyncio
import logging
import pickle
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import ModuleType
from typing import Any

import grpc
import pytest

import gradserve
import gradserve.aio
from gradserve.calls.exchange import CallbackError
from gradserve.transport.status import ERRORS, error_from_status
from gradserve_protocol import errors as client_errors
from gradserve_protocol.v1 import server_messages_pb2, tensor_messages_pb2
from gradserve_server import errors as server_errors
from gradserve_server.config import LimitsConfig
from gradserve_server.resources.cluster import MisplacedError
from gradserve_server.rpc.boundary.chain import Interceptor, Service
from gradserve_server.rpc.boundary.interceptors import Admission, Faults
from gradserve_server.rpc.boundary.status import STATUS_CODES, status_code
from gradserve_server.rpc.listeners.grpc.flow import Traffic
from gradserve_server.rpc.listeners.grpc.listener import make_handler
from gradserve_server.rpc.services import SERVICES
from tests.servers.polling import PATIENCE_SECONDS
from tests.servers.raw_calls import failure_of

TENSOR_SERVICE, *_, SERVER_SERVICE = SERVICES
GET_SERVER_INFO = f"/{SERVER_SERVICE.full_name}/GetServerInfo"
GET_TENSORS = f"/{TENSOR_SERVICE.full_name}/GetTensors"


def subclasses(root: type[Exception]) -> list[type[Exception]]:
    """Returns the classes of errors that users get. `CallbackError` gives way to what a callback has raised."""
    return [
        each for child in root.__subclasses__() for each in (child, *subclasses(child)) if each is not CallbackError
    ]


class RaisingServicer:
    """Answers every call by raising, streams after a first response."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __getattr__(self, method: str) -> Any:
        return self._stream if method == "GetTensors" else self._unary

    async def _unary(self, request: Any, call: Any) -> Any:
        raise self._error

    async def _stream(self, request: Any, call: Any) -> AsyncIterator[Any]:
        yield tensor_messages_pb2.GetTensorsResponse(chunk=b"first")
        raise self._error


@asynccontextmanager
async def raising_server(error: BaseException, admission: Admission | None = None) -> AsyncIterator[str]:
    """Runs a server whose every method raises `error`; yields its address."""
    server = grpc.aio.server()
    chain: tuple[Interceptor, ...] = (Faults(), admission or Admission())
    for service in SERVICES:
        raising = Service(service, RaisingServicer(error), chain)
        server.add_generic_rpc_handlers((make_handler(raising, Traffic.within(LimitsConfig())),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def caught(error: BaseException, admission: Admission | None = None) -> Any:
    """Returns the grpc.RpcError that a client sees when a method of the server raises `error`."""
    async with raising_server(error, admission) as address, grpc.aio.insecure_channel(address) as channel:
        call = channel.unary_unary(
            GET_SERVER_INFO, server_messages_pb2.GetServerInfoRequest.SerializeToString, lambda reply: reply
        )
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call(server_messages_pb2.GetServerInfoRequest(), timeout=PATIENCE_SECONDS)
        return raised.value


def as_exception(error: Any) -> gradserve.GradserveError:
    return error_from_status(error.code(), error.details(), error.trailing_metadata())


def test_every_domain_error_has_a_status_code_of_its_own() -> None:
    assert set(STATUS_CODES) == set(server_errors.ServiceError.__subclasses__())
    assert len(set(STATUS_CODES.values())) == len(STATUS_CODES)


def test_an_error_of_a_narrower_kind_has_the_status_code_of_the_wider_one() -> None:
    assert status_code(MisplacedError("no")) == "INVALID_ARGUMENT"


def test_every_status_code_has_an_exception() -> None:
    assert set(ERRORS) == set(grpc.StatusCode) - {grpc.StatusCode.OK}
    assert set(ERRORS.values()) <= set(subclasses(gradserve.GradserveError))


def test_domain_errors_and_exceptions_have_the_same_names() -> None:
    for error, code in STATUS_CODES.items():
        assert ERRORS[grpc.StatusCode[code]].__name__ == error.__name__


def test_every_exception_is_public() -> None:
    public = {getattr(gradserve, name) for name in gradserve.__all__}
    assert {gradserve.GradserveError, *subclasses(gradserve.GradserveError)} <= public


@pytest.mark.parametrize("tree", [client_errors, server_errors], ids=["client", "server"])
def test_the_drawn_tree_is_complete(tree: Any) -> None:
    assert tree.__doc__ is not None
    defined = {
        name
        for name, value in vars(tree).items()
        if getattr(value, "__module__", "") == tree.__name__
        and isinstance(value, type)
        and issubclass(value, Exception)
    }
    drawn = {word for word in tree.__doc__.replace("(", " ").split() if word in defined}
    assert drawn == defined


@pytest.mark.parametrize(
    ("exception", "builtin"),
    [
        (gradserve.InvalidArgumentError, ValueError),
        (gradserve.NotFoundError, KeyError),
        (gradserve.NotFoundError, LookupError),
        (gradserve.OutOfRangeError, IndexError),
        (gradserve.DeadlineExceededError, TimeoutError),
        (gradserve.UnavailableError, ConnectionError),
        (gradserve.UnavailableError, OSError),
        (gradserve.UnauthenticatedError, PermissionError),
        (gradserve.PermissionDeniedError, PermissionError),
        (gradserve.ForkedClientError, RuntimeError),
    ],
)
def test_exceptions_can_be_caught_as_builtins(
    exception: type[gradserve.GradserveError], builtin: type[Exception]
) -> None:
    with pytest.raises(builtin, match="went wrong"):
        raise exception("it went wrong", field="x")


@pytest.mark.parametrize("exception", [gradserve.GradserveError, *subclasses(gradserve.GradserveError)])
def test_exceptions_say_their_message_and_survive_pickling(exception: type[gradserve.GradserveError]) -> None:
    error = exception("expected 'a', got \"b\"", field="x.y")
    error.request_id = 7
    for each in (error, pickle.loads(pickle.dumps(error))):  # noqa: S301
        assert type(each) is exception
        assert str(each) == f"{each.message} [{each.code}]"
        assert each.message == "expected 'a', got \"b\""
        assert (each.field, each.request_id) == ("x.y", 7)
    assert exception("no field").field is None


@pytest.mark.parametrize("field", [None, "gradient[0].dense.shape"])
@pytest.mark.parametrize("error", list(STATUS_CODES), ids=lambda error: error.__name__)
async def test_message_and_field_arrive(error: type[server_errors.ServiceError], field: str | None) -> None:
    message = 'Shape mismatch: expected [?,3], got [2], 100 % "ψ" 🙂'
    seen = await caught(error(message, field=field))
    assert failure_of(seen).field == field
    exception = as_exception(seen)
    assert type(exception) is ERRORS[grpc.StatusCode[STATUS_CODES[error]]]
    version = f"; this client is gradserve {gradserve.__version__}"
    assert exception.message == message + (version if error is server_errors.UnimplementedError else "")
    assert exception.field == field


async def test_the_client_raises_it() -> None:
    error = server_errors.OutOfRangeError("no such step", field="step")
    async with raising_server(error) as address:
        async with gradserve.aio.connect(address) as client:
            with pytest.raises(gradserve.OutOfRangeError, match="no such step") as raised:
                await client.server_info()
            assert raised.value.field == "step"
        with gradserve.connect(address, timeout=PATIENCE_SECONDS) as blocking:
            with pytest.raises(gradserve.OutOfRangeError, match="no such step") as raised:
                await asyncio.to_thread(blocking.server_info)
            assert raised.value.field == "step"
            assert raised.value.__cause__ is None


@pytest.mark.parametrize(
    "text",
    ["worker, " * 5000, "é" * 10_000, "🙂" * 10_000, "%" * 10_000, "\n\t" * 5000, "a🙂" * 5000],
    ids=["ascii", "two bytes", "four bytes", "percent", "control", "mixed"],
)
@pytest.mark.parametrize("field", [None, "gradient[12].sparse.indices"])
async def test_long_messages_are_cut_and_arrive(text: str, field: str | None) -> None:
    exception = as_exception(await caught(server_errors.DeadlineExceededError(text, field=field)))
    assert type(exception) is gradserve.DeadlineExceededError
    assert exception.message.endswith(" ...")
    assert text.startswith(exception.message.removesuffix(" ..."))
    assert 100 < len(exception.message) < 2100
    assert exception.field == field


@pytest.mark.parametrize("length", [1, 1000, 1500])
async def test_messages_of_usual_length_arrive_whole(length: int) -> None:
    exception = as_exception(await caught(server_errors.NotFoundError("x" * length)))
    assert exception.message == "x" * length


@pytest.mark.parametrize(
    "error",
    [
        ValueError("secret"),
        KeyError("secret"),
        RuntimeError("secret"),
        AssertionError("secret"),
        OSError(5, "secret"),
        TimeoutError("secret"),
        ExceptionGroup("secret", [ValueError("secret")]),
        grpc.RpcError("secret"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_the_unexpected_is_internal_and_stays_in_the_log(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        seen = failure_of(await caught(error))
    assert seen.code is grpc.StatusCode.INTERNAL
    assert "secret" not in seen.message
    assert seen.message == "internal error; the server's log has the details"
    assert seen.field is None
    assert "secret" in caplog.text
    assert "GetServerInfo" in caplog.text


async def test_a_failing_library_is_internal_and_told_to_caller_and_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        seen = failure_of(await caught(server_errors.InternalError("cudnnCreate failed")))
    assert (seen.code, seen.message) == (grpc.StatusCode.INTERNAL, "cudnnCreate failed")
    assert "GetServerInfo" in caplog.text
    assert "cudnnCreate failed" in caplog.text


async def test_no_memory_is_a_limit_reached() -> None:
    seen = failure_of(await caught(MemoryError("secret")))
    assert seen.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert seen.message == "the server has no memory left for this call"


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (server_errors.NotFoundError("gone"), grpc.StatusCode.NOT_FOUND, "gone"),
        (ValueError("secret"), grpc.StatusCode.INTERNAL, "internal error; the server's log has the details"),
    ],
    ids=["expected", "unexpected"],
)
async def test_streams_end_with_the_status(error: Exception, code: grpc.StatusCode, message: str) -> None:
    async with raising_server(error) as address, grpc.aio.insecure_channel(address) as channel:
        call = channel.unary_stream(GET_TENSORS, lambda request: request, lambda reply: reply)(
            b"", timeout=PATIENCE_SECONDS
        )
        assert await call.read() == tensor_messages_pb2.GetTensorsResponse(chunk=b"first").SerializeToString()
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call.read()
        assert (raised.value.code(), raised.value.details()) == (code, message)


async def test_a_draining_server_is_unavailable() -> None:
    admission = Admission()
    admission.close()
    seen = failure_of(await caught(AssertionError("is not called"), admission))
    assert seen.code is grpc.StatusCode.UNAVAILABLE
    assert "shutting down" in seen.message


@pytest.mark.parametrize(
    "details",
    [b"", b"\xff\xff", b"\x1a\x05\x0a\x01x\x12\x00", "text"],
    ids=["empty", "garbage", "unknown detail", "not binary"],
)
def test_foreign_details_are_passed_over(details: bytes | str) -> None:
    trailers = (("other", "x"), ("grpc-status-details-bin", details))
    error = error_from_status(grpc.StatusCode.INVALID_ARGUMENT, "no", trailers)
    assert (type(error), error.message, error.field) == (gradserve.InvalidArgumentError, "no", None)


@pytest.mark.parametrize("message", [None, ""])
def test_a_status_without_a_message_is_named(message: str | None) -> None:
    error = error_from_status(grpc.StatusCode.DATA_LOSS, message, None)
    assert type(error) is gradserve.InternalError
    assert str(error) == "DATA_LOSS [GS_INTERNAL]"


@pytest.mark.parametrize(
    ("module", "root"),
    [(gradserve.errors, gradserve.GradserveError), (server_errors, server_errors.ServiceError)],
    ids=["client", "server"],
)
def test_the_tree_in_the_docstring_has_every_error(module: ModuleType, root: type[Exception]) -> None:
    drawn = re.findall(r"[├└]── (\w+)(?: \((\w+)\))? ", module.__doc__ or "")
    errors = {each.__name__: each for each in root.__subclasses__() if each is not CallbackError}
    assert {name for name, _ in drawn} == errors.keys()
    for name, built_in in drawn:
        bases = [each.__name__ for each in errors[name].__bases__]
        assert bases == [root.__name__, *([built_in] if built_in else [])]
