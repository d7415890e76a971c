"""Workers of which every round needs all, so that kills change nothing; run as a program, like `elastic_fleet`.

A gradient depends on the weights, the step and the worker only, and its elements are few multiples of a power of two:
their sums are exact in any order. So a run ends with the same bits, however often workers and servers were killed.
"""

import json
import time
from pathlib import Path

import torch
from torch.optim.lr_scheduler import MultiStepLR

import gradserve
import gradserve.torch
from tests.servers.polling import PATIENCE_SECONDS
from tests.torch.elastic_fleet import digest_of, main

NUM_STEPS = 24
HELD_STEP = NUM_STEPS - 1
NUM_WORKERS = 3
_STEPS_OF_ONE = 4096


def work(address: str, folder: Path, name: str) -> None:
    """Trains to NUM_STEPS, with the gradients that any worker of this name sends at a step."""
    torch.set_num_threads(1)
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.GELU(), torch.nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
    scheduler = MultiStepLR(optimizer, [8, 16], gamma=0.1)
    with (
        gradserve.connect(address, timeout=PATIENCE_SECONDS) as client,
        gradserve.torch.average_gradients(
            client, model, optimizer, num_required=NUM_WORKERS, name="net", scheduler=scheduler, worker_id=name
        ) as run,
    ):
        while run.step < NUM_STEPS:
            while run.step >= HELD_STEP and not (folder / "go").exists():
                time.sleep(0.01)
            x = torch.randn(16, 6, generator=torch.Generator().manual_seed(1000 * run.step + ord(name)))
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = torch.nn.functional.mse_loss(model(x).float(), torch.sin(x[:, :3]))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad = torch.round(parameter.grad * _STEPS_OF_ONE) / _STEPS_OF_ONE
            optimizer.step()
            scheduler.step()
            (folder / f"{name}.step").write_text(str(run.step))
    result = {"step": run.step, "rate": optimizer.param_groups[0]["lr"], "weights": digest_of(model)}
    (folder / f"{name}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(work)
