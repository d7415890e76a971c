"""Users of a Unix socket, who need no token."""

import os
from pathlib import Path
from typing import Any

import pytest

import gradserve
import gradserve.aio
from gradserve_server.app import Server
from gradserve_server.config import ListenConfig, RuntimeConfig, SecurityConfig, ServerConfig
from tests.security.serving import TOKENS, entry
from tests.servers.polling import PATIENCE_SECONDS


def config(folder: Path, uid: int) -> ServerConfig:
    access = folder / "access.toml"
    access.write_text(entry("me", {"*": "chief"}, users=(uid,)) + entry("worker", {"*": "worker"}, TOKENS["worker"]))
    return ServerConfig(
        listen=ListenConfig(listen=(f"unix:{folder}/s", "127.0.0.1:0")),
        runtime=RuntimeConfig(device="cpu", warm_up=False, drain_seconds=5),
        security=SecurityConfig(access=str(access)),
    )


def connect(address: str, **settings: Any) -> gradserve.aio.Client:
    return gradserve.aio.connect(address, timeout=PATIENCE_SECONDS, **settings)


async def test_a_known_user_of_a_unix_socket_needs_no_token(tmp_path: Path) -> None:
    async with Server(config(tmp_path, os.getuid())) as server:
        local, remote = server.addresses
        async with connect(local) as me, connect(local, token=TOKENS["worker"]) as worker:
            handle = await me.put([1.0])
            assert (await me.server_info()).transport.way == "shared_memory"
            await me.conditional_accumulator("float32", (), shared_name="x")
            # The token counts, not the user.
            with pytest.raises(gradserve.PermissionDeniedError, match="'worker' has the role worker"):
                await worker.delete_accumulator("x")
            with pytest.raises(gradserve.NotFoundError):
                await worker.get(handle)
            assert await me.get(handle) == [1.0]
        async with connect(local, token=TOKENS["admin"]) as stranger:
            with pytest.raises(gradserve.UnauthenticatedError, match="does not know this token"):
                await stranger.put([1.0])
        async with connect(remote) as elsewhere:
            with pytest.raises(gradserve.UnauthenticatedError, match="needs credentials"):
                await elsewhere.put([1.0])


async def test_an_unknown_user_is_refused(tmp_path: Path) -> None:
    async with Server(config(tmp_path, os.getuid() + 1)) as server:
        async with connect(server.addresses[0]) as stranger:
            with pytest.raises(gradserve.UnauthenticatedError):
                await stranger.put([1.0])
        async with connect(server.addresses[0], transport="shared_memory") as stranger:
            with pytest.raises(gradserve.GradserveError, match=f"does not know the user {os.getuid()}"):
                await stranger.put([1.0])
