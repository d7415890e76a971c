"""The contract: described, served and used in full."""

import re
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from tests.servers.polling import PATIENCE_SECONDS
from tests.servers.raw_calls import METHODS, SERVICES, RawCalls, failure_of

PROTOS = Path(__file__).parents[2] / "proto"
PACKAGE = PROTOS / "gradserve" / "v1"


@pytest.fixture(scope="module")
def raw(server_address: str) -> Iterator[RawCalls]:
    with RawCalls(server_address) as calls:
        yield calls


def declarations(keyword: str) -> list[tuple[str, str]]:
    """Returns the names that a keyword declares in the protos, each with the line above it."""
    found = []
    for path in sorted(PACKAGE.glob("*.proto")):
        above = ""
        for line in path.read_text().splitlines():
            match = re.match(rf"\s*{keyword} (\w+)", line)
            if match:
                found.append((match[1], above))
            above = line.strip()
    return found


def test_the_protos_declare_what_the_stubs_have() -> None:
    assert sorted(name for name, _ in declarations("rpc")) == sorted(METHODS)
    assert sorted(name for name, _ in declarations("service")) == sorted(SERVICES)


@pytest.mark.parametrize("keyword", ["rpc", "service"])
def test_all_are_described(keyword: str) -> None:
    assert [name for name, above in declarations(keyword) if not above.startswith("//")] == []


def test_every_file_begins_with_what_it_is_for() -> None:
    for path in PACKAGE.glob("*.proto"):
        assert re.match(r"// \w", path.read_text()), path.name


@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_method_has_its_own_messages(method: str) -> None:
    descriptor = METHODS[method]
    assert descriptor.input_type.name == f"{method}Request"
    assert descriptor.output_type.name == f"{method}Response"


@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_method_is_served(raw: RawCalls, method: str) -> None:
    try:
        raw.call(method, b"")
    except grpc.RpcError as error:
        failure = failure_of(error)
        assert failure.code is grpc.StatusCode.INVALID_ARGUMENT
        assert failure.field is not None


@pytest.mark.parametrize("service", [*SERVICES, "NoService"])
def test_other_methods_are_not(raw: RawCalls, service: str) -> None:
    path = f"/gradserve.v1.{service}/NoMethod"
    call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = raw.channel.unary_unary(path)
    with pytest.raises(grpc.RpcError) as raised:
        call(b"", timeout=PATIENCE_SECONDS)
    assert failure_of(raised.value).code is grpc.StatusCode.UNIMPLEMENTED
