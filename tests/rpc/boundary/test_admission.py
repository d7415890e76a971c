"""Calls are let in until the server drains."""

import pytest

from gradserve_server.errors import UnavailableError
from gradserve_server.rpc.boundary.chain import Call, chained
from gradserve_server.rpc.boundary.interceptors import Admission
from tests.servers.raw_calls import METHODS

METHOD = METHODS["GetServerInfo"]


async def test_only_until_it_closes() -> None:
    answered: list[str] = []

    async def answer(request: str, call: Call) -> None:
        answered.append(request)

    admission = Admission()
    handle = chained((admission,), METHOD, answer)
    await handle("before", Call(METHOD.full_name))
    admission.close()
    assert not admission.is_open
    with pytest.raises(UnavailableError, match="the server is shutting down"):
        await handle("after", Call(METHOD.full_name))
    assert answered == ["before"]
