"""ParameterService of an aggregator, which forwards no updates: it says where parameters are."""

from collections.abc import Awaitable, Callable
from typing import Any

from gradserve_server.errors import UnimplementedError
from gradserve_server.rpc.boundary.chain import Call


class NoParameters:
    """Refuses every call of ParameterService."""

    def __init__(self, upstream: str) -> None:
        """`upstream` is the address of the server upstream, for errors."""
        self._upstream = upstream

    def __getattr__(self, method: str) -> Callable[[Any, Call], Awaitable[Any]]:
        """Returns a method that refuses its calls."""
        if method.startswith("_"):
            raise AttributeError(method)
        return self._refuse

    async def _refuse(self, _request: Any, _call: Call) -> Any:
        raise UnimplementedError(
            f"this server is an aggregator, which has no parameters and forwards no updates: connect to the server "
            f"upstream, {self._upstream}"
        )
