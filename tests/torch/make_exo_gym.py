"""Records the losses of exo gym's DiLoCo on a small model: writes exo_gym.json beside this file.

Runs in an environment of its own, which `make golden` makes so:

    python3 -m venv .venv-golden-exo-gym
    .venv-golden-exo-gym/bin/pip install torch==2.13.0 numpy==2.4.6 tqdm einops psutil
    .venv-golden-exo-gym/bin/pip install --no-deps git+https://github.com/exo-explore/gym@9fa323c26364f4437ffd23517da5d65946003963
    .venv-golden-exo-gym/bin/python -m tests.torch.make_exo_gym

On a CPU, exo gym's first worker and its master have the same tensors after a synchronization, so that the outer
gradients of later ones are 0. On a GPU they are copies, and so they are here.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing
from exogym.strategy import DiLoCoStrategy, OptimSpec

from tests.torch.exo_gym import CASES, NUM_STEPS, NUM_WORKERS, SYNC_EVERY, loss_of, make_model


def train(rank: int, folder: str, case: dict[str, Any]) -> None:
    """Trains as one worker; writes its losses into a file of the folder."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=NUM_WORKERS
    )
    model = make_model()
    schedule: dict[str, Any] = {}
    if case["warmup"] is not None:
        kwargs = {"warmup_steps": case["warmup"], "cosine_anneal": True}
        schedule = {"lr_scheduler": "lambda_cosine", "lr_scheduler_kwargs": kwargs}
    strategy = DiLoCoStrategy(
        optim_spec=OptimSpec(torch.optim.AdamW, lr=case["lr"]),
        outer_optim_spec=OptimSpec(torch.optim.SGD, lr=case["outer_lr"], momentum=0.9, nesterov=True),
        H=SYNC_EVERY,
        max_norm=case["max_norm"],
        **schedule,
    )
    strategy._init_node(model, rank, NUM_WORKERS)
    strategy.max_steps = NUM_STEPS
    losses = []
    for step in range(NUM_STEPS):
        strategy.zero_grad()
        loss = loss_of(model, rank, step)
        loss.backward()
        strategy.step()
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
        losses.append(loss.item())
    Path(folder, f"{rank}.json").write_text(json.dumps(losses), encoding="utf-8")
    torch.distributed.destroy_process_group()


def main() -> None:
    """Trains by each configuration."""
    recorded = {}
    for name, case in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(train, (folder, case), NUM_WORKERS)
            recorded[name] = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(NUM_WORKERS)]
    path = Path(__file__).with_name("exo_gym.json")
    path.write_text(json.dumps(recorded, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
