"""The form in which callers show a token, the same over gRPC and HTTP."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from gradserve_protocol.v1 import server_messages_pb2
from gradserve_server.security.identity import Credentials, digest_of, in_authorization
from gradserve_testing import LocalServer
from tests.observe.http_client import connect, url_of
from tests.security.serving import TOKENS, all_entries, serving

TOKEN = TOKENS["admin"]

GOOD = [f"Bearer {TOKEN}", f"bearer {TOKEN}", f"BEARER   {TOKEN} "]

BAD: list[list[str]] = [
    [TOKEN],
    [f"Basic {TOKEN}"],
    [f"Token {TOKEN}"],
    [f"Bearer{TOKEN}"],
    [f"Bearer:{TOKEN}"],
    [f"Bearer {TOKEN} {TOKEN}"],
    [f"{TOKEN} Bearer"],
    ["Bearer"],
    ["Bearer "],
    [""],
    [f"Bearer {TOKEN}", f"Bearer {TOKEN}"],
]


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path: Path = tmp_path_factory.mktemp("authorization") / "access.toml"
    with serving(path, all_entries(), http_listen="127.0.0.1:0") as server:
        yield server


def over_grpc(local: LocalServer, values: Sequence[str]) -> str:
    """Returns the status of a call that shows these values."""
    with grpc.insecure_channel(local.address) as channel:
        call: Any = channel.unary_unary(
            "/gradserve.v1.ServerService/GetServerInfo",
            response_deserializer=server_messages_pb2.GetServerInfoResponse.FromString,
        )
        try:
            call(b"", timeout=60, metadata=[("authorization", each) for each in values])
        except grpc.RpcError as error:
            failed: Any = error
            assert TOKEN not in failed.details()
            return str(failed.code().name)
        return "OK"


def over_http(local: LocalServer, values: Sequence[str]) -> int:
    """Returns the status of a request that shows these values."""
    connection = connect(url_of(local))
    connection.putrequest("GET", "/api/status")
    for each in values:
        connection.putheader("Authorization", each)
    connection.endheaders()
    status = connection.getresponse().status
    connection.close()
    return status


@pytest.mark.parametrize("value", GOOD, ids=["as usual", "in lower case", "in upper case, with spaces"])
def test_a_token_is_known(local: LocalServer, value: str) -> None:
    assert (over_grpc(local, [value]), over_http(local, [value])) == ("OK", 200)


@pytest.mark.parametrize("values", BAD, ids=lambda values: " ".join(values).replace(TOKEN, "TOKEN"))
def test_any_other_form_is_refused(local: LocalServer, values: Sequence[str]) -> None:
    assert (over_grpc(local, values), over_http(local, values)) == ("UNAUTHENTICATED", 401)


def test_what_was_shown_in_another_form_is_not_nothing() -> None:
    """Otherwise a certificate or a user would count in its place."""
    assert in_authorization([]) == Credentials()
    assert in_authorization([f"Bearer {TOKEN}"]) == Credentials(digest_of(TOKEN))
    assert in_authorization(["Gradserve-User key"]) == Credentials(user_key="key")
    for values in BAD:
        found = in_authorization(values)
        assert found.problem
        assert TOKEN not in found.problem
