"""Workers that train as users do, with AdamW, a schedule, clipping and bfloat16; run as a program.

Starts a worker for each line of its standard input, which has the server's address, a folder and the worker's name, and
prints its process id. Workers are forked from one process that has imported PyTorch, so that one more takes a moment.
Each writes its step to FOLDER/NAME.step, its result to FOLDER/NAME.json, and what it says to FOLDER/errors. They wait
at HELD_STEP for FOLDER/go: what is to happen while they train does so before they end, however busy the machine is.
Ends when its input has ended and no worker runs any more.
"""

import hashlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from torch.optim.lr_scheduler import LinearLR, MultiStepLR, SequentialLR

import gradserve
import gradserve.torch
from tests.servers.polling import PATIENCE_SECONDS

NUM_STEPS = 60
HELD_STEP = 30
NUM_REQUIRED = 2
WARM_UP_STEPS = 5
DROPS = (20, 35)
"""The steps after the warm-up at which the learning rate falls."""


def network() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(6, 16), torch.nn.BatchNorm1d(16), torch.nn.GELU(), torch.nn.Linear(16, 3)
    )


def schedule(optimizer: torch.optim.Optimizer) -> SequentialLR:
    warm_up = LinearLR(optimizer, 0.1, total_iters=WARM_UP_STEPS)
    drops = MultiStepLR(optimizer, list(DROPS), gamma=0.1)
    return SequentialLR(optimizer, [warm_up, drops], milestones=[WARM_UP_STEPS])


def digest_of(model: torch.nn.Module) -> str:
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    return digest.hexdigest()


def work(address: str, folder: Path, name: str) -> None:
    """Trains to NUM_STEPS and stays, as a worker that joins, correct at every step."""
    torch.set_num_threads(1)
    torch.manual_seed(sum(name.encode()))
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
    scheduler = schedule(optimizer)
    losses: list[float] = []
    with (
        gradserve.connect(address, timeout=PATIENCE_SECONDS) as client,
        gradserve.torch.average_gradients(
            client, model, optimizer, num_required=NUM_REQUIRED, name="net", scheduler=scheduler, worker_id=name
        ) as run,
    ):
        while run.step < NUM_STEPS:
            while run.step >= HELD_STEP and not (folder / "go").exists():
                time.sleep(0.01)
            x = torch.randn(16, 6)
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = torch.nn.functional.mse_loss(model(x).float(), torch.sin(x[:, :3]))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            losses.append(loss.item())
            (folder / f"{name}.step").write_text(str(run.step))
    result = {"step": run.step, "rate": optimizer.param_groups[0]["lr"], "weights": digest_of(model), "losses": losses}
    (folder / f"{name}.json").write_text(json.dumps(result))


def main(work: Callable[[str, Path, str], None]) -> None:
    workers = []
    for line in sys.stdin:
        address, folder, name = line.split()
        process = os.fork()
        if process == 0:
            status = 1
            try:
                with (Path(folder) / "errors").open("a") as errors:
                    os.dup2(errors.fileno(), sys.stderr.fileno())
                work(address, Path(folder), name)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        workers.append(process)
        sys.stdout.write(f"{process}\n")
        sys.stdout.flush()
    for process in workers:
        os.waitpid(process, 0)


if __name__ == "__main__":
    main(work)
