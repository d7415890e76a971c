"""An address that leads to several servers in turn, as behind a load balancer: none of them was started again."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import pytest

import gradserve
from gradserve.calls.client import ClientCalls
from gradserve.calls.exchange import Operation
from gradserve.calls.identity import RequestIds
from gradserve.calls.retries import Attempt, Contact
from gradserve.transport.blocking.transport import NetworkTransport
from gradserve.transport.driving import attempts, completed, drive
from gradserve.transport.settings import ConnectionSettings
from gradserve_protocol.address import Address
from gradserve_server.config import ServerConfig, StateConfig
from gradserve_testing import LocalServer
from tests.servers.connecting import client_over
from tests.servers.runtime import NOT_WARMED_UP

T = TypeVar("T")

SETTINGS = ConnectionSettings()
MODEL = {"w": np.zeros(1, np.float32)}
A, B = 0, 1
MOST_CALLS = 50
"""More than it takes to notice; a client that does not would go on for ever."""


class Balancer:
    """A transport over which each call goes to one of several servers.

    Attributes:
        choices: The server of each call.
    """

    def __init__(self, servers: Sequence[NetworkTransport]) -> None:
        self._servers = servers
        self.choices: Iterator[int] = itertools.repeat(A)

    def run(self, operation: Operation[T], /) -> T:
        return completed(drive(attempts(operation, SETTINGS, Contact()), self._perform))

    def close(self) -> None:
        for each in self._servers:
            each.close()

    async def _perform(self, step: Any) -> Any:
        target = next(self.choices, None) if isinstance(step, Attempt) else A
        assert target is not None, "it goes on for ever"
        return await self._servers[target]._perform(step)


@pytest.fixture
def balancer(tmp_path: Path) -> Iterator[Balancer]:
    """Leads to two servers, each of which has the same accumulators."""
    with ExitStack() as stack:
        transports = []
        for name in "ab":
            config = ServerConfig(runtime=NOT_WARMED_UP, state=StateConfig(state_dir=str(tmp_path / name)))
            server = stack.enter_context(LocalServer(config))
            with gradserve.connect(server.address) as client:
                for each in DURABILITIES:
                    client.gradient_accumulator(MODEL, each, durability=each)
            transports.append(NetworkTransport([Address.to_connect(server.address)], SETTINGS))
        balancer = Balancer(transports)
        stack.callback(balancer.close)
        yield balancer


DURABILITIES: tuple[Literal["none", "round"], ...] = ("none", "round")
CALLS: dict[str, Callable[[Any], object]] = {
    "question": lambda acc: acc.num_accumulated(),
    "apply": lambda acc: acc.apply_grad(MODEL),
    "wait": lambda acc: acc.push_pull(MODEL, 99, timeout=math.inf),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize(
    ("durability", "turns"),
    [
        ("none", [B, A]),  # refused by B; A, which was to have ended, answers
        ("none", [B, B, A, A]),
        ("round", [B, A]),  # with [B, B], the accumulator of A is not found
    ],
)
def test_the_error_says_so(
    balancer: Balancer, turns: list[int], call: Callable[[Any], object], durability: Literal["none", "round"]
) -> None:
    """However gradients that were accepted before would be sent again, or are lost."""
    client = client_over(balancer, "balancer:1", ClientCalls(RequestIds("me"), SETTINGS.times))
    acc = client.gradient_accumulator(MODEL, durability, durability=durability)
    acc.apply_grad(MODEL)
    balancer.choices = itertools.islice(itertools.cycle(turns), MOST_CALLS)
    with pytest.raises(gradserve.AbortedError, match="leads to different servers"):
        call_again_and_again(acc, call)


def call_again_and_again(acc: Any, call: Callable[[Any], object]) -> None:
    while True:
        with suppress(gradserve.LostError):  # what looks like a restart at first
            call(acc)
