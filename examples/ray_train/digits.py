"""Workers of Ray Train learn to read digits, and average their gradients on a gradserve cluster on the same Ray.

From the top folder of a checkout:

    pip install '.[ray,torch]' 'ray[train]' scikit-learn
    gradserve cluster up --servers 2 --name train
    RAY_ADDRESS=... python examples/ray_train/digits.py gradserve+ray://train

`cluster up` prints the address of Ray, if it has started one. Ray Train places the workers, and makes a process group
of them, which is used here only to compare their weights at the end.

The lines that make workers of a training function are those with `gradserve` in `train`.
"""

import argparse
import hashlib
import tempfile
import uuid
from typing import Any

import numpy as np
import ray
import torch
from ray.train import Checkpoint, RunConfig, ScalingConfig, get_context, report
from ray.train.torch import TorchTrainer
from sklearn.datasets import load_digits

import gradserve.torch

NUM_STEPS = 100
BATCH = 32


def train(config: dict[str, Any]) -> None:
    """Trains as one worker; reports the steps, the accuracy and digests of the weights of all workers."""
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.from_numpy(images.astype(np.float32) / 16), torch.from_numpy(labels)
    size, rank = get_context().get_world_size(), get_context().get_world_rank()
    torch.manual_seed(rank)  # other batches, and other initial weights, which those of the first worker replace
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with (
        gradserve.connect(config["address"], timeout=60) as client,
        gradserve.torch.average_gradients(client, model, optimizer, num_required=size, name=config["run"]) as averaging,
    ):
        while averaging.step < NUM_STEPS:
            batch = torch.randint(1500, (BATCH,))
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    digests: list[Any] = [None] * size
    torch.distributed.all_gather_object(digests, hashlib.sha256(weights.numpy()).hexdigest()[:16])
    accuracy = (model(images[1500:]).argmax(1) == labels[1500:]).float().mean().item()
    with tempfile.TemporaryDirectory() as folder:
        torch.save(model.state_dict(), f"{folder}/model.pt")
        checkpoint = Checkpoint.from_directory(folder) if rank == 0 else None
        report({"step": averaging.step, "accuracy": accuracy, "weights": digests}, checkpoint)


def main(address: str, num_workers: int, cpus_per_worker: float) -> None:
    """Trains on the Ray of RAY_ADDRESS, or that runs on this machine, and prints what became of it."""
    ray.init(log_to_driver=False)
    with tempfile.TemporaryDirectory() as folder:
        trainer = TorchTrainer(
            train,
            train_loop_config={"address": address, "run": f"digits-{uuid.uuid4()}"},
            scaling_config=ScalingConfig(num_workers=num_workers, resources_per_worker={"CPU": cpus_per_worker}),
            run_config=RunConfig(storage_path=folder),
        )
        metrics = trainer.fit().metrics
    assert metrics is not None
    for rank, digest in enumerate(metrics["weights"]):
        print(f"worker {rank}: step {metrics['step']}, weights {digest}")
    print(f"{100 * metrics['accuracy']:.1f}% of the test digits")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("address", help="the cluster: gradserve+ray://NAME, or HOST:PORT of a server")
    parser.add_argument("--workers", type=int, default=2, help="how many workers (default: 2)")
    parser.add_argument("--cpus-per-worker", type=float, default=1.0, help="CPUs of Ray for each (default: 1)")
    arguments = parser.parse_args()
    main(arguments.address, arguments.workers, arguments.cpus_per_worker)
