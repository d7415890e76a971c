"""The connection of a worker, which goes the way that its case names."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import numpy as np

import gradserve
from benchmarks.peers.driver import Setup

TIMEOUT_SECONDS = 60.0


@dataclass(frozen=True)
class Connection:
    """A client, and how it handles arrays.

    Attributes:
        client: The client.
        in_place: Gradients are arrays of `client.empty`, and averages are read where the server wrote them.
    """

    client: Any
    in_place: bool

    @classmethod
    def of(cls, setup: Setup) -> Connection:
        """Connects by the way `transport`."""
        transport = setup.options["transport"]
        choice = {"transport": transport}
        if transport == "grpc" and "transport" not in inspect.signature(gradserve.connect).parameters:
            choice = {}  # an earlier commit, which has no other way
        connect: Any = gradserve.connect
        return cls(connect(setup.server["address"], timeout=TIMEOUT_SECONDS, **choice), setup.options["in_place"])

    @property
    def reading(self) -> dict[str, Any]:
        """The arguments of calls that return an average."""
        return {"copy": False} if self.in_place else {}

    def gradient(self, shape: tuple[int, ...], value: float) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Returns a gradient with the same value everywhere."""
        array: np.ndarray[Any, np.dtype[np.float32]]
        array = self.client.empty(shape, np.float32) if self.in_place else np.empty(shape, np.float32)
        array.fill(value)
        return array
