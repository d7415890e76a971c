"""Whatever is passed to whatever method, its error is one of gradserve's."""

import inspect
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

import gradserve
import gradserve.aio
from gradserve_testing import LocalServer
from tests.arguments.absurd import ABSURD
from tests.arguments.calls import Things, make_ready, make_things, methods, value_of
from tests.servers.polling import PATIENCE_SECONDS


@pytest.fixture(scope="module")
def server_address(_compiled_kernels: None) -> Iterator[str]:
    """Of a server of this file alone: much is left on it. It is prepared: loading kernels changes, for a moment, the
    filters of warnings of this process."""
    with LocalServer() as local:
        local.wait_until_prepared()
        yield local.address


@pytest.fixture(params=["blocking", "aio"])
def face(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def things(
    face: str, server_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Things]:
    monkeypatch.chdir(tmp_path)  # for files of absurd names
    if face == "blocking":
        with gradserve.connect(server_address, timeout=PATIENCE_SECONDS) as client:
            yield await make_things(client)
    else:
        async with gradserve.aio.connect(server_address, timeout=PATIENCE_SECONDS) as aio_client:
            yield await make_things(aio_client)


@pytest.mark.parametrize("method", methods(gradserve))
async def test_a_good_call(things: Things, method: str) -> None:
    await make_ready(things, method)
    await value_of(things.method(method)(**things.arguments(method)))


@pytest.mark.filterwarnings("ignore::gradserve.IgnoredArgumentWarning")
@pytest.mark.parametrize("method", methods(gradserve))
async def test_absurd_arguments(things: Things, face: str, method: str) -> None:
    """Both faces have the same operations; so the second one gets a share."""
    values = ABSURD if face == "blocking" else dict(list(ABSURD.items())[:: len(ABSURD) // 6])
    call, good = things.method(method), things.arguments(method)
    escaped = []
    for parameter in inspect.signature(call).parameters.values():
        for what, make in values.items():
            value = make()
            if parameter.name == "progress" and callable(value):
                continue  # it is called, and what it raises comes out of the call
            await make_ready(things, method)
            try:
                if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
                    await value_of(call(value))
                else:
                    await value_of(call(**{**good, parameter.name: value}))
            except gradserve.GradserveError:
                pass
            except Exception as error:
                if parameter.name == "path" and isinstance(error, OSError):
                    continue  # there is no such file
                escaped.append(f"{what} as {parameter.name}: {error!r}"[:300])
    assert not escaped, f"{len(escaped)}\n" + "\n".join(escaped)


def test_both_faces_have_these_methods() -> None:
    assert methods(gradserve) == methods(gradserve.aio)


@pytest.mark.parametrize("connect", [gradserve.connect, gradserve.aio.connect], ids=["blocking", "aio"])
@pytest.mark.parametrize("what", ABSURD)
async def test_absurd_connections(connect: Any, what: str) -> None:
    for arguments in ({"address": ABSURD[what]()}, {"address": "localhost:1", "timeout": ABSURD[what]()}):
        try:
            await value_of(connect(**arguments).close())
        except gradserve.GradserveError as error:
            assert isinstance(error, gradserve.InvalidArgumentError)  # noqa: PT017
