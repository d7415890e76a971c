"""Four workers teach a small language model characters by DiLoCo: they train alone, and synchronize every 50 steps.

From the top folder of a checkout, with a server running (`make serve`):

    pip install . torch
    python examples/diloco_characters.py localhost:50051

The text is Python's own help, which comes with every Python. One process trains for a while, and the workers begin with
its model. With `--compare`, the same is also done by one process on the same tokens, by workers that average every
gradient, with another outer optimizer, and with codecs; `--json FILE` stores all losses. They are of text that nobody
has trained on.

The lines that make workers of a script are those with `gradserve` in `work`.
"""

import argparse
import copy
import json
import math
import multiprocessing
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, TypeAlias

import torch
from torch.nn.functional import cross_entropy

import gradserve.torch
from gradserve import optim

NUM_WORKERS = 4
SYNC_EVERY = 50
LENGTH, BATCH = 32, 8
"""Characters of an example, and examples of a worker's step."""
NUM_CHARACTERS = 96
LEARNING_RATE = 3e-3
CODECS = ("int8", "int4", "e3m0", "topk")
MEAN, NESTEROV = optim.SGD(1.0), optim.SGD(0.7, momentum=0.9, nesterov=True)
State: TypeAlias = dict[str, Any]


class Characters(torch.nn.Module):  # type: ignore[misc]
    """Predicts the next character."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(NUM_CHARACTERS, 24)
        self.memory = torch.nn.GRU(24, 64, batch_first=True)
        self.head = torch.nn.Linear(64, NUM_CHARACTERS)

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        """Returns the loss of predicting each character of examples from those before it."""
        remembered, _ = self.memory(self.embedding(characters[:, :-1]))
        return cross_entropy(self.head(remembered).flatten(0, 1), characters[:, 1:].flatten())


def text() -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the characters to train on, as numbers, and those to measure with: a tenth."""
    joined = "\n".join(topics[title] for title in sorted(topics)).encode("ascii", "replace")
    numbers = torch.tensor(list(joined)).sub(31).clamp(0, NUM_CHARACTERS - 1)
    split = 9 * len(numbers) // 10
    return numbers[:split], numbers[split:]


def examples(characters: torch.Tensor, seed: int, number: int) -> torch.Tensor:
    """Returns random pieces of a text."""
    starts = torch.randint(len(characters) - LENGTH, (number,), generator=torch.Generator().manual_seed(seed))
    return torch.stack([characters[start : start + LENGTH + 1] for start in starts.tolist()])


def batch(characters: torch.Tensor, worker: int, step: int) -> torch.Tensor:
    """Returns the examples of a worker's step."""
    return examples(characters, 1_000_003 * worker + step, BATCH)


class Training:
    """A model with its inner optimizer and the schedule of its learning rate, from where another one has left off."""

    def __init__(self, num_steps: int, begin: State | None = None) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(1)
        self.model = Characters()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)
        if begin is not None:
            self.model.load_state_dict(begin["model"])
            self.optimizer.load_state_dict(copy.deepcopy(begin["optimizer"]))  # PyTorch would change that in place
        # To 0, but for the model to begin with, which is to be trained further.
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: 1.0 if begin is None else 0.5 + 0.5 * math.cos(math.pi * step / num_steps)
        )

    def train(self, batches: Iterator[torch.Tensor]) -> None:
        """Takes a step with each batch."""
        for characters in batches:
            self.optimizer.zero_grad()
            self.model(characters).backward()
            self.optimizer.step()
            self.scheduler.step()

    def loss(self) -> float:
        """Returns the loss on text that nobody has trained on."""
        with torch.no_grad():
            return float(self.model(examples(text()[1], 0, 1024)))


def by_one_process(steps: range, begin: State | None) -> tuple[float, State]:
    """Trains on the batches of all workers at once; returns the loss, and the state of the training."""
    characters = text()[0]
    training = Training(len(steps), begin)
    training.train(torch.cat([batch(characters, each, step) for each in range(NUM_WORKERS)]) for step in steps)
    return training.loss(), {"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()}


def work(address: str, run: str, worker: int, steps: range, begin: State, options: Any, losses: Any) -> None:
    """Trains as one worker, by DiLoCo or, with None for options, with the mean of every gradient; tells the loss."""
    characters = text()[0]
    training = Training(len(steps), begin)
    model, optimizer, scheduler = training.model, training.optimizer, training.scheduler
    common = {"name": run, "num_required": NUM_WORKERS, "scheduler": scheduler}
    with gradserve.connect(address, timeout=300) as client:
        together: AbstractContextManager[Any]
        if options is None:
            together = gradserve.torch.average_gradients(client, model, optimizer, **common)
        else:
            together = gradserve.torch.DiLoCo(client, model, optimizer, sync_every=SYNC_EVERY, **common, **options)
        with together:
            training.train(batch(characters, worker, step) for step in steps)
    losses.put(training.loss())


def by_workers(address: str, steps: range, begin: State, options: Any) -> float:
    """Trains by workers; returns the loss, which all have."""
    losses: Any = multiprocessing.Queue()
    run = f"characters-{uuid.uuid4()}"
    workers = [
        multiprocessing.Process(target=work, args=(address, run, worker, steps, begin, options, losses))
        for worker in range(NUM_WORKERS)
    ]
    for each in workers:
        each.start()
    found: set[float] = {losses.get() for _ in workers}
    for each in workers:
        each.join()
    (loss,) = found
    return loss


def main(address: str, warm_up: int, num_steps: int, *, compare: bool, file: Path | None) -> None:
    """Trains in one way, or in all, and prints the losses."""
    loss, begin = by_one_process(range(warm_up), None)
    print(f"loss {loss:.4f} after {warm_up} steps of one process")
    steps = range(warm_up, warm_up + num_steps)
    diloco = partial(by_workers, address, steps, begin)
    ways: dict[str, Callable[[], float]] = {"DiLoCo, the mean": partial(diloco, {"outer_optimizer": MEAN})}
    if compare:
        codec = {"outer_optimizer": MEAN, "codec_down": "bf16"}
        ways = {
            "one process on the same tokens": lambda: by_one_process(steps, begin)[0],
            "workers that average every gradient": partial(diloco, None),
            **ways,
            "DiLoCo, Nesterov": partial(diloco, {"outer_optimizer": NESTEROV}),
            **{f"DiLoCo, the mean, {each}": partial(diloco, {**codec, "codec": each}) for each in CODECS},
        }
    found = {"begin": loss}
    for title, train in ways.items():
        began = time.monotonic()
        found[title] = train()
        seconds = time.monotonic() - began
        print(f"{title}: loss {found[title]:.4f} after {num_steps} more steps, {seconds:.0f} s", flush=True)
    if file is not None:
        settings = {"warm_up": warm_up, "steps": num_steps, "sync_every": SYNC_EVERY, "workers": NUM_WORKERS}
        file.write_text(json.dumps({"settings": settings, "losses": found}, indent=2) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("address", help="HOST:PORT of the server")
    parser.add_argument("--warm-up", type=int, default=500, metavar="N", help="steps of one process before")
    parser.add_argument("--steps", type=int, default=500, metavar="N", help="steps of each worker")
    parser.add_argument("--compare", action="store_true", help="train in other ways, too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="store the losses there")
    arguments = parser.parse_args()
    main(arguments.address, arguments.warm_up, arguments.steps, compare=arguments.compare, file=arguments.json)
