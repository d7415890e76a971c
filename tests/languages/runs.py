"""Runs whose workers are programs of the examples."""

from abc import ABC, abstractmethod
from contextlib import ExitStack
from pathlib import Path
from typing import ClassVar, NamedTuple, Self

import numpy as np

import gradserve
from tests.languages.programs import Worker, running
from tests.servers.polling import eventually

WORDS = 50
MANY_WORDS = 1_000_000
"""The gradient has 4 bytes for each word. More than 3 MiB do not travel inside of messages."""
ZEROS = {"weights": np.zeros(WORDS, np.float32), "bias": np.zeros((), np.float32)}


class Seen(NamedTuple):
    """The state of a run on a server: its step, the gradients in the round, and the workers that wait for its end."""

    step: int
    num_gradients: int
    num_waiting: int


class Run(ABC):
    """Workers of one run, which end with the block.

    Attributes:
        program: The program of the workers.
        name: The name of the run.
        address: The address of its server.
    """

    program: ClassVar[str]

    def __init__(self, folder: Path, name: str, address: str) -> None:
        self.name = name
        self.address = address
        self._folder = folder
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def start(self, language: str, worker: str, *options: object, address: str = "", **environment: str) -> Worker:
        """Starts a worker; a round needs two gradients."""
        return self._stack.enter_context(
            running(
                self.program,
                language,
                self._folder,
                address or self.address,
                worker,
                "--run",
                self.name,
                "--required",
                2,
                *options,
                environment=environment,
            )
        )

    def wait_until(self, client: gradserve.Client, step: int, num_gradients: int) -> None:
        """Waits until the run is at a step, with so many gradients in the round."""
        eventually(lambda: self.look(client)[:2], lambda seen: seen == (step, num_gradients))

    def wait_until_waiting(self, client: gradserve.Client, num_waiting: int) -> None:
        """Waits until so many workers wait for the end of the round."""
        eventually(lambda: self.look(client).num_waiting, lambda seen: seen == num_waiting)

    @abstractmethod
    def look(self, client: gradserve.Client) -> Seen:
        """Returns what the server has of the run."""


class WordsRun(Run):
    """Workers that have parameters of their own, and average gradients."""

    program = "words_worker"

    def look(self, client: gradserve.Client) -> Seen:
        """Returns what the accumulator of the gradients has."""
        info = client.gradient_accumulator(ZEROS, self.name, keep_averages=8, idle_lease=3600).info()
        return Seen(info.global_step, info.num_accumulated, info.num_waiting)


class ParametersRun(Run):
    """Workers whose parameters the server holds."""

    program = "parameters_worker"

    def look(self, client: gradserve.Client) -> Seen:
        """Returns what the parameters have; nothing before the first worker has created them."""
        found = [each for each in client.list_parameters() if each.name == self.name]
        return Seen(found[0].step, found[0].num_updates, found[0].num_waiting) if found else Seen(0, 0, 0)
