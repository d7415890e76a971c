"""The contract: described, served and used in full."""

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from gradserve.calls import client, exchange, private_resources, server
from gradserve.calls.accumulators import wire as accumulator_wire
from gradserve.calls.batch_norm import wire as batch_norm_layer_wire
from gradserve.calls.raw_ops import batch_norm, cudnn_rnn, cudnn_rnn_params, gru
from gradserve.calls.tensors import arguments as tensors
from gradserve.transport import methods
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


@pytest.mark.parametrize("method", sorted(METHODS))
def test_the_client_uses_every_method(method: str) -> None:
    service = METHODS[method].containing_service.name
    sources = "".join(
        inspect.getsource(module)
        for module in (
            *(accumulator_wire, batch_norm_layer_wire, client, exchange, methods, private_resources, server, tensors),
            *(batch_norm, cudnn_rnn, cudnn_rnn_params, gru),
        )
    )
    sources = re.sub(r"([(,])\s+", r"\1 ", sources).replace("( ", "(")
    # As the method of a unary exchange, with tensors in the request, as an op, or at the end of the path of a stream.
    spellings = (
        *(f'Unary("{service}", "{method}"', f'Unary(_SERVICE, "{method}"', f'call_with_inputs(_SERVICE, "{method}"'),
        *(f'run_op("{method}"', f'/{method}"'),
    )
    assert any(spelling in sources for spelling in spellings)
