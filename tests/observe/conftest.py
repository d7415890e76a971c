"""A server with access control, HTTP ports that show what is there at once, and no call that a test leaves behind."""

from collections.abc import Iterator

import pytest

from gradserve_server.observe.calls import current_call
from gradserve_server.observe.http import views as latest
from gradserve_testing import LocalServer
from tests.security.serving import all_entries, serving


@pytest.fixture(scope="package")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    with serving(tmp_path_factory.mktemp("access") / "access.toml", all_entries()) as server:
        yield server


@pytest.fixture(autouse=True)
def no_call_is_left() -> Iterator[None]:
    yield
    call = current_call()
    if call is not None:
        call.has_ended = True


@pytest.fixture(autouse=True)
def nothing_is_shown_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latest, "EVERY_SECONDS", 0.0)
    monkeypatch.setattr(latest, "REST", 0.0)
