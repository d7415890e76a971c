"""A server that asks silent connections for a sign of life every second; it ends when its input does.

python -m tests.links.server CONFIG, where CONFIG is a ServerConfig as JSON.
"""

import asyncio
import sys
from functools import partial

from gradserve_server.app import Server
from gradserve_server.config import ServerConfig
from gradserve_server.parts import Parts
from gradserve_server.rpc.listeners.grpc.listener import ClientKeepalive, GrpcListener

_KEEPALIVE = ClientKeepalive(interval=1.0, timeout=5.0)


async def _serve(config: ServerConfig) -> None:
    async with Server(config, Parts(make_listener=partial(GrpcListener, keepalive=_KEEPALIVE))):
        sys.stdout.write("serving\n")
        sys.stdout.flush()
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(_serve(ServerConfig.model_validate_json(sys.argv[1])))
