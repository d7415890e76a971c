"""A ResNet-18 in PyTorch (11.7 million parameters, 47 MB as float32), and batches of random images for it."""

from __future__ import annotations

import torch
from torch import nn

NUM_CLASSES = 1000
_WIDTHS = (64, 128, 256, 512)
"""The channels in each of the four stages, of two blocks each."""


class _Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(y)) + self.downsample(x))


def resnet18() -> nn.Module:
    """Returns the network, with the same weights in every process."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [
        nn.Conv2d(3, _WIDTHS[0], 7, 2, 3, bias=False),
        nn.BatchNorm2d(_WIDTHS[0]),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
    ]
    channels = _WIDTHS[0]
    for stage, width in enumerate(_WIDTHS):
        layers += [_Block(channels, width, 2 if stage else 1), _Block(width, width, 1)]
        channels = width
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, NUM_CLASSES)]
    return nn.Sequential(*layers)


def batch_of(rank: int, num_images: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the images and labels of a worker."""
    generator = torch.Generator().manual_seed(rank)
    images = torch.randn(num_images, 3, size, size, generator=generator)
    return images, torch.randint(NUM_CLASSES, (num_images,), generator=generator)
