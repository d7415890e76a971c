from collections.abc import AsyncIterator

import pytest

from gradserve_server.app import Server
from gradserve_server.config import ListenConfig, ServerConfig
from tests.floods.servicers import Servicers
from tests.servers.certificates import Certificates, make_certificates
from tests.servers.runtime import NOT_WARMED_UP


@pytest.fixture
async def servicers() -> AsyncIterator[Servicers]:
    listen = ListenConfig(listen=("127.0.0.1:0",), bulk_listen="off", shared_memory_socket="off")
    async with Server(ServerConfig(listen=listen, runtime=NOT_WARMED_UP)) as server:
        yield Servicers(server)


@pytest.fixture(scope="package")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))
