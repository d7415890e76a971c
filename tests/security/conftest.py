"""Certificates of every kind, made once, and a server with access control."""

from collections.abc import Iterator

import pytest

from gradserve_testing import LocalServer
from tests.security.serving import all_entries, serving
from tests.servers.certificates import Certificates, make_certificates


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="session")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    with serving(tmp_path_factory.mktemp("access") / "access.toml", all_entries()) as local:
        yield local
