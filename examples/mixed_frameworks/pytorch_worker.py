"""Trains with PyTorch; `average_gradients` is the only line that knows of other workers."""

import torch
from digits import NUM_STEPS, NUM_WORKERS, RATE, Task, share

import gradserve
import gradserve.torch


def train(task: Task) -> torch.nn.Module:
    """Trains together with the other workers."""
    images, labels = map(torch.from_numpy, share(task.share))
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Tanh(), torch.nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    with (
        gradserve.connect(task.address, timeout=60) as client,
        gradserve.torch.average_gradients(
            client, model, optimizer, num_required=NUM_WORKERS, name=task.name
        ) as averaging,
    ):
        while averaging.step < NUM_STEPS:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
    print(f"PyTorch: loss {loss:.4f} on its own digits")
    return model


if __name__ == "__main__":
    told = Task.from_command_line()
    told.save_weights({name: each.detach().numpy() for name, each in train(told).named_parameters()})
