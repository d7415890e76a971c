"""The losses of exo gym's DiLoCo, step by step, with the same batches. make_exo_gym.py says how they were recorded."""

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import gradserve
from gradserve import optim
from gradserve.torch import DiLoCo
from tests.servers.polling import PATIENCE_SECONDS
from tests.torch.exo_gym import CASES, NUM_STEPS, NUM_WORKERS, SYNC_EVERY, loss_of, make_model
from tests.torch.training_threads import together

RECORDED = json.loads(Path(__file__).with_name("exo_gym.json").read_text(encoding="utf-8"))


def factor(step: int, warmup: int) -> float:
    """Exo gym's schedule: a linear warm-up, then a cosine down to a tenth."""
    if step < warmup:
        return step / warmup
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / (NUM_STEPS - warmup)))


@pytest.mark.parametrize("case", CASES)
def test_losses_are_those_of_exo_gym(server_address: str, name: str, case: str) -> None:
    settings = CASES[case]

    def work(rank: int) -> list[float]:
        model = make_model()
        inner = torch.optim.AdamW(model.parameters(), lr=settings["lr"])
        warmup = settings["warmup"]
        schedule: Any = (
            None if warmup is None else torch.optim.lr_scheduler.LambdaLR(inner, partial(factor, warmup=warmup))
        )
        losses = []
        with (
            gradserve.connect(server_address, timeout=PATIENCE_SECONDS) as client,
            DiLoCo(
                client,
                model,
                inner,
                sync_every=NUM_STEPS,
                outer_optimizer=optim.SGD(settings["outer_lr"], momentum=0.9, nesterov=True),
                name=name,
                num_required=NUM_WORKERS,
                scheduler=schedule,
                deterministic=True,
                worker_id=str(rank),
            ) as diloco,
        ):
            for step in range(NUM_STEPS):
                inner.zero_grad()
                loss = loss_of(model, rank, step)
                loss.backward()
                if settings["max_norm"] is not None:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), settings["max_norm"])
                inner.step()
                if step and step % SYNC_EVERY == 0:  # after 5 steps at first, as exo gym does
                    diloco.sync()
                if schedule is not None:
                    schedule.step()
                losses.append(loss.item())
        return losses

    found = together(*[partial(work, rank) for rank in range(NUM_WORKERS)])
    for losses, expected in zip(found, RECORDED[case], strict=True):
        assert losses == pytest.approx(expected, rel=1e-9)
