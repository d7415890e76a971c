"""Clients that stop at an exact stage of a round, for something to happen there."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import gradserve
from gradserve.calls.client import ClientCalls
from gradserve.calls.combinators import map_steps
from gradserve.calls.exchange import Exchange, Operation, Pause, Together, Unary, Whole
from gradserve.transport.blocking.transport import NetworkTransport
from gradserve.transport.settings import ConnectionSettings
from gradserve_protocol.address import Address
from tests.servers.connecting import client_over

T = TypeVar("T")

_AVERAGED = ("PushPull", "TakeGradient")


@dataclass(frozen=True)
class Stage:
    """A moment of a round.

    Attributes:
        methods: The methods of the calls that lead to it.
        num_answers: How many of these calls have been answered; 0: the first is about to be made.
        loses_answer: Whether the client does not get the last of these answers, and the program makes its call again.
    """

    methods: Collection[str]
    num_answers: int = 0
    loses_answer: bool = False

    def __str__(self) -> str:
        return next(name for name, stage in STAGES.items() if stage is self)


NUM_SERVERS = 3
STAGES = {
    "before staging": Stage(["StageGradient"]),
    "staged on some": Stage(["StageGradient"], 1),
    "staged on all": Stage(["ApplyGradient", "PushPull"]),
    "accepted": Stage(["ApplyGradient"], 1),
    "accepted, and the answer lost": Stage(["ApplyGradient"], 1, loses_answer=True),
    "decided": Stage(_AVERAGED, 1),
    "decided, and the answer lost": Stage(_AVERAGED, 1, loses_answer=True),
    "reduced by some": Stage(["ReduceGradients"], 1),
    "reduced by all, and the answer lost": Stage(["ReduceGradients"], NUM_SERVERS, loses_answer=True),
}


class StoppingTransport:
    """Carries out the operations of a client, and makes something happen at one stage of the first round.

    Calls that belong to the stage wait until it has come.

    Attributes:
        has_happened: Whether it has.
    """

    def __init__(self, addresses: Sequence[str], settings: ConnectionSettings, stage: Stage) -> None:
        """Takes the servers, and the stage. What happens is set later."""
        self._network = NetworkTransport([Address.to_connect(each) for each in addresses], settings)
        self._stage = stage
        self._num_begun = self._num_answered = 0
        self.happen: Callable[[], object] = lambda: None
        self.has_happened = False

    def run(self, operation: Operation[T], /) -> T:
        """See `BlockingTransport`."""
        return self._network.run(map_steps(operation, self._form))

    def close(self) -> None:
        """See `BlockingTransport`."""
        self._network.close()

    def _form(self, exchange: Exchange) -> Operation[Any]:
        if isinstance(exchange, Together):
            return (yield Together(tuple([map_steps(each, self._form) for each in exchange.operations])))
        call = exchange.call if isinstance(exchange, Whole) else exchange
        if self.has_happened or not isinstance(call, Unary) or call.method not in self._stage.methods:
            return (yield exchange)
        if not self._stage.num_answers:
            self._do()
            return (yield exchange)
        self._num_begun += 1
        if self._num_begun > self._stage.num_answers:
            while not self.has_happened:
                yield Pause(0.001)
        answer = yield exchange
        self._num_answered += 1
        if self._num_answered == self._stage.num_answers:
            self._do()
            if self._stage.loses_answer:
                raise gradserve.UnavailableError("the answer was lost")
        return answer

    def _do(self) -> None:
        self.has_happened = True
        self.happen()


def stopping_client(addresses: Sequence[str], stage: Stage) -> tuple[gradserve.Client, StoppingTransport]:
    """Returns a client that stops at a stage."""
    settings = ConnectionSettings.wanted(60.0, None, None, None, None, {"GRADSERVE_RESTART_PATIENCE": "60"})
    transport = StoppingTransport(addresses, settings, stage)
    calls = ClientCalls.of_new_client(settings.times, settings.kept_bytes, list(addresses))
    return client_over(transport, ",".join(addresses), calls), transport
