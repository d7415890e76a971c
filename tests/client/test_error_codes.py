"""Codes of errors: every error has one, every code an entry, and those of the server arrive over every transport."""

import asyncio
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.rpc import code_pb2, error_details_pb2, status_pb2

import gradserve
import gradserve.aio
from gradserve.transport.status import error_from_reply, error_from_status
from gradserve_protocol import errors
from gradserve_protocol.troubleshooting import BY_CODE, DOMAIN, ENTRIES, code_in, entries_of, is_code, nearest
from gradserve_testing import InProcessServer
from tests.client.test_errors import ERROR_TYPES
from tests.servers.connecting import no_server
from tests.servers.polling import PATIENCE_SECONDS

ROOT = Path(__file__).parents[2]
SOURCES = [
    path
    for folder in ("client", "server")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if path.name != "troubleshooting.py" and path.parent.name != "v1"
]


@pytest.mark.parametrize("error_type", ERROR_TYPES, ids=lambda each: each.__name__)
def test_every_class_has_a_code_whose_entry_is_the_first_of_the_class(
    error_type: type[gradserve.GradserveError],
) -> None:
    error = error_type("it went wrong")
    assert error.code == error_type.code
    assert "code" in vars(error_type)
    assert entries_of(error_type.__name__)[0] is BY_CODE[error.code]
    assert str(error) == f"it went wrong [{error.code}]"


def test_codes_are_unique_words_for_a_shell() -> None:
    assert len(BY_CODE) == len(ENTRIES)
    assert all(is_code(each.code) and code_in(f"no [{each.code.lower()}]") == each.code for each in ENTRIES)
    assert {each.error for each in ENTRIES} == {each.__name__ for each in ERROR_TYPES}


def test_every_code_in_the_sources_has_an_entry_and_every_entry_is_in_the_sources() -> None:
    used = {code for path in SOURCES for code in re.findall(r'"(GS_[A-Z0-9_]+)"', path.read_text())}
    assert used == BY_CODE.keys()


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda each: each.code)
def test_entries_say_what_to_do_on_pages_that_exist(entry: Any) -> None:
    assert entry.means
    assert entry.cure
    assert not entry.page or (ROOT / "docs" / entry.page.partition("#")[0]).is_file()
    assert all(command.startswith("gradserve ") for command in entry.commands)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("GS_STAEL", "GS_STALE"), ("stale", "GS_STALE"), ("no-such-name", "GS_NO_SUCH_NAME"), ("memry", "GS_MEMORY")],
)
def test_the_nearest_codes_have_the_one_that_was_meant(text: str, wanted: str) -> None:
    assert wanted in nearest(text)
    assert nearest("resnet/head/0") == ()


def details(*infos: error_details_pb2.ErrorInfo) -> status_pb2.Status:
    status = status_pb2.Status(code=code_pb2.NOT_FOUND, message="no")
    for info in infos:
        status.details.add().Pack(info)
    return status


@pytest.mark.parametrize(
    ("reason", "domain", "code"),
    [
        ("GS_NO_TENSOR", DOMAIN, "GS_NO_TENSOR"),
        ("GS_OF_A_LATER_VERSION", DOMAIN, "GS_OF_A_LATER_VERSION"),
        ("GS_NO_TENSOR", "googleapis.com", "GS_NOT_FOUND"),
        ("\x1b[2J", DOMAIN, "GS_NOT_FOUND"),
        ("GS_" + "X" * 1000, DOMAIN, "GS_NOT_FOUND"),
        ("", DOMAIN, "GS_NOT_FOUND"),
    ],
    ids=["finer", "later version", "another domain", "hostile", "long", "empty"],
)
def test_a_finer_code_is_that_of_the_server(reason: str, domain: str, code: str) -> None:
    status = details(error_details_pb2.ErrorInfo(reason=reason, domain=domain))
    trailers = (("grpc-status-details-bin", status.SerializeToString()),)
    for error in (
        error_from_status(grpc.StatusCode.NOT_FOUND, "no", trailers),
        error_from_reply(grpc.StatusCode.NOT_FOUND, status),
    ):
        assert (error.code, str(error)) == (code, f"no [{code}]")
        assert pickle.loads(pickle.dumps(error)).code == code  # noqa: S301


def test_an_older_server_sends_no_codes() -> None:
    assert error_from_status(grpc.StatusCode.NOT_FOUND, "no", None).code == errors.NotFoundError.code
    assert error_from_reply(grpc.StatusCode.NOT_FOUND, details()).code == errors.NotFoundError.code


@pytest.fixture(scope="module")
def in_process() -> Iterator[str]:
    with InProcessServer() as server:
        yield server.address


@pytest.fixture(params=["grpc", "bulk", "shared_memory", "in_process"])
def way(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    """The address of a server, and the options of `connect` for a way to it."""
    options: dict[str, Any] = {"timeout": PATIENCE_SECONDS}
    if request.param == "in_process":
        return request.getfixturevalue("in_process"), options
    return request.getfixturevalue("server_address"), {**options, "transport": request.param}


def test_codes_arrive_over_every_transport_and_in_both_clients(way: tuple[str, dict[str, Any]], name: str) -> None:
    address, options = way
    with gradserve.connect(address, **options) as client:
        acc = client.gradient_accumulator({"w": np.zeros(3, np.float32)}, shared_name=name)
        with pytest.raises(gradserve.InvalidArgumentError, match=r"Shape mismatch.* \[GS_SHAPE_MISMATCH\]$"):
            acc.apply_grad({"w": np.zeros(4, np.float32)}, local_step=0)
        with pytest.raises(gradserve.AlreadyExistsError, match=r"another spec.* \[GS_OTHER_SPEC\]$"):
            client.gradient_accumulator({"w": np.zeros(4, np.float32)}, shared_name=name)

    async def again() -> None:
        async with gradserve.aio.connect(address, **options) as client:
            with pytest.raises(gradserve.AlreadyExistsError, match=r" \[GS_OTHER_SPEC\]$"):
                await client.gradient_accumulator({"w": np.zeros(4, np.float32)}, shared_name=name)

    asyncio.run(again())


def test_a_code_of_the_clients_own() -> None:
    with (
        no_server() as address,
        gradserve.connect(address, timeout=PATIENCE_SECONDS) as client,
        pytest.raises(gradserve.UnavailableError, match=r"no connection: .* \[GS_NO_CONNECTION\]$"),
    ):
        client.server_info()


def test_the_status_says_what_became_of_a_request(server_address: str, name: str) -> None:
    gradient = {"w": np.ones(3, np.float32)}
    with (
        gradserve.connect(server_address, timeout=PATIENCE_SECONDS) as client,
        gradserve.connect(server_address) as other,
    ):
        acc = client.gradient_accumulator({"w": np.zeros(3, np.float32)}, shared_name=name)
        parameters = client.parameters({"w": np.zeros(3, np.float32)}, shared_name=name, num_required=2)

        def known(request_id: int, by: gradserve.Client = other) -> list[tuple[str, str, int]]:
            found = by.server_status(name_contains=name, request_id=request_id).requests
            return [(each.kind, each.outcome, each.step) for each in found]

        with pytest.raises(gradserve.DeadlineExceededError) as raised:
            acc.push_pull(gradient, num_required=2, timeout=0.0, worker_id="a")
        request_id = raised.value.request_id
        assert request_id is not None
        assert known(request_id) == [("accumulator", "accepted", 0)]
        acc.take_grad(1)
        assert known(request_id) == [("accumulator", "accepted", 1)]
        acc.apply_grad(gradient, local_step=0, worker_id="a", request_id=7)
        assert known(7, client) == [("accumulator", "stale", 0)]
        assert known(7) == []  # it is another client's
        with pytest.raises(gradserve.DeadlineExceededError) as raised:
            parameters.push_pull(gradient, local_step=0, timeout=0.0, worker_id="a")
        assert raised.value.request_id is not None
        assert known(raised.value.request_id) == [("parameters", "accepted", 0)]
