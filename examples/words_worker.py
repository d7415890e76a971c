"""One worker of a training run; the others may be words_worker.js, words_worker.cpp, or this again.

Needs only gradserve's client. From the top folder of a checkout, with a server running (`make serve`):

    pip install .
    python examples/words_worker.py localhost:50051

A round needs two gradients, so start it twice, or with a worker in another language. The model is a logistic regression
that sorts out messages by the words in them; every worker has messages of its own. All apply the same averages in the
same order to the same parameters. A worker that comes later, or was away, asks the others for theirs, in accumulators
beside that of the gradients: see docs/other_languages_gradients.md.
"""

import argparse
import os
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import gradserve

NUM_MESSAGES = 200
MESSAGE_WORDS = 9
LEARNING_RATE = np.float32(4)
"""A power of two, so that an update is rounded once and has the same bits in every language."""
KEEP_AVERAGES = 8
"""So many rounds a worker can be late without taking over all parameters again."""
IDLE_LEASE = 3600.0
"""The accumulators end by themselves when nobody has used them for so many seconds."""
ANSWER_SECONDS = 5.0
ATTEMPTS_TO_JOIN = 6
NEVER_STALE = 1 << 53
"""Requests, and answers to them, have no step."""

Parameters = dict[str, NDArray[Any]]


class Message(NamedTuple):
    """The numbers of the words of a message, and whether more of them are even than odd."""

    words: list[int]
    is_unwanted: bool


def make_messages(seed: str, num_words: int) -> list[Message]:
    """Returns the messages of one worker."""
    generator = random.Random(seed)
    messages = []
    for _ in range(NUM_MESSAGES):
        words = [generator.randrange(num_words) for _ in range(MESSAGE_WORDS)]
        messages.append(Message(words, sum(word % 2 == 0 for word in words) > MESSAGE_WORDS / 2))
    return messages


def predict(parameters: Parameters, message: Message) -> float:
    """Returns the probability that a message is unwanted."""
    score = parameters["bias"] + sum(float(parameters["weights"][word]) for word in message.words)
    return float(1 / (1 + np.exp(-score)))


def gradient_of(parameters: Parameters, messages: list[Message]) -> Parameters:
    """Returns the gradient of the mean cross-entropy of the messages."""
    gradient = {name: np.zeros_like(parameter) for name, parameter in parameters.items()}
    for message in messages:
        error = (predict(parameters, message) - message.is_unwanted) / len(messages)
        np.add.at(gradient["weights"], message.words, error)
        gradient["bias"] += error
    return gradient


class TrainingRun:
    """A training run as one of its workers sees it.

    Attributes:
        parameters: The parameters, the same for all workers at the same step.
        step: The number of averages that were applied to them.
    """

    def __init__(self, client: gradserve.Client, name: str, worker: str, parameters: Parameters) -> None:
        """Takes part in a run: with these parameters if nobody else does yet, otherwise with those of the others."""

        def accumulator(purpose: str, components: Parameters, keep_averages: int = 1) -> gradserve.GradientAccumulator:
            return client.gradient_accumulator(
                components, shared_name=name + purpose, keep_averages=keep_averages, idle_lease=IDLE_LEASE
            )

        zero = np.zeros(())
        self._name = name
        self._worker = worker
        self._gradients = accumulator("", parameters, KEEP_AVERAGES)
        self._joining = accumulator("/joining", {"request": zero})
        self._state = accumulator("/state", {**parameters, "step": zero})
        initial = accumulator("/initial", parameters)
        if self._gradients.info().global_step == 0:
            # The first call ends the only round that there ever is; all others are stale, and get its average.
            self._receive(initial.push_pull(parameters, 1, 0, worker_id=worker, on_stale="return"))
            self.step = 0
        else:
            self._take_state()

    def average(self, gradient: Parameters, num_required: int) -> bool:
        """Averages a gradient with those of other workers, and applies what was averaged since this worker's step.

        Returns:
            Whether the gradient counted.
        """
        pulled = self._push_pull(gradient, num_required)
        if pulled.outcome is gradserve.Outcome.STALE:
            self._catch_up(pulled.global_step)
            return False
        self._apply(pulled)
        if pulled.worker_ids[0] == self._worker:  # one worker of each round looks
            self._answer_joining()
        return True

    def _push_pull(self, gradient: Parameters, num_required: int) -> gradserve.PushPullResult:
        request_id = None
        for _ in range(60):
            try:
                return self._gradients.push_pull(
                    gradient,
                    num_required,
                    self.step,
                    worker_id=self._worker,
                    on_stale="return",
                    timeout=1,
                    request_id=request_id,
                )
            except gradserve.DeadlineExceededError as error:
                waited, request_id = error, error.request_id  # the gradient stays in the round
            self._answer_joining()
        raise waited

    def _apply(self, average: gradserve.Average) -> None:
        for name, parameter in self.parameters.items():
            parameter -= LEARNING_RATE * average[name]
        self.step = average.step

    def _catch_up(self, step: int) -> None:
        try:
            while self.step < step:
                self._apply(self._gradients.read_average(self.step + 1))
        except gradserve.OutOfRangeError:
            self._take_state()

    def _take_state(self) -> None:
        for _ in range(ATTEMPTS_TO_JOIN):
            before = self._state.info().global_step
            self._joining.apply_grad({"request": 1.0}, NEVER_STALE, worker_id=self._worker)
            try:
                try:
                    state = self._state.read_average(before + 1, timeout=ANSWER_SECONDS)
                except gradserve.OutOfRangeError:  # others have asked, too: there is a newer one
                    state = self._state.read_average()
            except gradserve.DeadlineExceededError:
                continue  # the worker that took the request may have ended before it answered
            self._receive({name: state[name] for name in state if name != "step"})
            self.step = int(state["step"])
            return
        raise SystemExit(
            f"no worker of the run {self._name!r} answers: it is over, or all of them have ended. "
            "Begin a new run under another name."
        )

    def _answer_joining(self) -> None:
        """Publishes this worker's parameters if somebody has asked for them."""
        if not self._joining.num_accumulated():
            return
        # This ends the round of the requests, for one worker alone: another one then finds its own gradient alone.
        taken = self._joining.push_pull({"request": 0.0}, 1, NEVER_STALE, worker_id=self._worker)
        if taken.num_gradients > 1:
            state = {**self.parameters, "step": np.array(float(self.step))}
            self._state.push_pull(state, 1, NEVER_STALE, worker_id=self._worker)

    def _receive(self, parameters: Mapping[str, NDArray[Any]]) -> None:
        self.parameters = {name: np.array(parameters[name]) for name in parameters}


def main() -> None:
    """Takes part in the run that the command line names, until a step."""
    parser = argparse.ArgumentParser(description="one worker of a training run")
    parser.add_argument("address", metavar="HOST:PORT")
    parser.add_argument("--run", default="words", help="name of the run")
    parser.add_argument("--worker", default=f"python-{os.getpid()}", help="id of this worker")
    parser.add_argument("--required", type=int, default=2, help="gradients in a round")
    parser.add_argument("--steps", type=int, default=40, help="the step to stop at")
    parser.add_argument("--words", type=int, default=50, help="number of different words")
    parser.add_argument("--output", type=Path, help="file for the parameters")
    options = parser.parse_args()
    messages = make_messages(options.worker, options.words)
    with gradserve.connect(options.address) as client:
        zeros = {"weights": np.zeros(options.words, np.float32), "bias": np.zeros((), np.float32)}
        run = TrainingRun(client, options.run, options.worker, zeros)
        print(f"{options.worker}: begins at step {run.step}", flush=True)
        num_counted = 0
        while run.step < options.steps:
            num_counted += run.average(gradient_of(run.parameters, messages), options.required)
    num_right = sum((predict(run.parameters, each) > 0.5) == each.is_unwanted for each in messages)
    print(
        f"{options.worker}: step {run.step}, {num_counted} gradients counted, "
        f"{100 * num_right / len(messages):.0f} % of the messages are sorted right"
    )
    if options.output:
        options.output.write_bytes(run.parameters["weights"].tobytes() + run.parameters["bias"].tobytes())


if __name__ == "__main__":
    main()
