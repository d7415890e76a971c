"""Requests of every method, over gRPC. An input is the name of a method, a line feed, and a request."""

import random
from typing import Self

from tests.fuzz.mutations import mutated_request
from tests.fuzz.targets.recording import ALONE, Recording, kind_of
from tests.fuzz.targets.served import Served
from tests.servers.raw_calls import METHODS


class Calls:
    """Sends requests to a server."""

    def __init__(self, recording: Recording = ALONE) -> None:
        self.corpus = [method.encode() + b"\n" + request for method, request in recording.calls()]
        self._served = Served(recording)

    def __enter__(self) -> Self:
        self._served.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._served.__exit__(*exception)

    def mutated(self, data: bytes, chance: random.Random) -> bytes:
        method, _, request = data.partition(b"\n")
        name = method.decode(errors="replace")
        if name not in METHODS:
            return chance.choice(self.corpus)
        return method + b"\n" + mutated_request(request, kind_of(name), chance)

    def run(self, data: bytes) -> None:
        method, _, request = data.partition(b"\n")
        name = method.decode(errors="replace")
        if name in METHODS:
            self._served.call(name, [request] * (2 if METHODS[name].client_streaming and len(request) % 2 else 1))

    def check(self) -> None:
        self._served.check()
