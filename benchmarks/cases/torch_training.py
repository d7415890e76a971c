"""Training steps of a ResNet-18 in PyTorch, beside the program alone and beside DistributedDataParallel over gloo."""

from __future__ import annotations

import os

from benchmarks.harness.comparison import Comparison
from benchmarks.harness.contestants import Contestant
from benchmarks.harness.environments import PROJECT
from benchmarks.harness.verdicts import Target

_NUM_BYTES = 4 * 11_689_512
_AVERAGING, _HOOK = "gradserve, average_gradients", "gradserve, comm_hook"
_ALONE, _GLOO = "PyTorch alone", "DistributedDataParallel over gloo"
_NUM_IMAGES, _IMAGE_SIZE = 8, 224
_STEPS = 3


def comparisons() -> list[Comparison]:
    """One worker beside the same program without averaging; two beside DistributedDataParallel."""
    return [
        _compare(
            1, Contestant(_ALONE, PROJECT, worker="benchmarks.peers.pytorch.training", options=_options(1)), 1 / 1.1
        ),
        _compare(
            2,
            Contestant(
                _GLOO, PROJECT, worker="benchmarks.peers.gloo.data_parallel", num_workers=2, options=_options(2)
            ),
            1.0,
        ),
    ]


def _options(num_workers: int) -> dict[str, object]:
    num_threads = max(1, (os.cpu_count() or 1) // num_workers)
    return {"num_threads": num_threads, "num_images": _NUM_IMAGES, "image_size": _IMAGE_SIZE}


def _compare(num_workers: int, peer: Contestant, speed: float) -> Comparison:
    def own(label: str, *, hook: bool) -> Contestant:
        return Contestant(
            label,
            PROJECT,
            server="benchmarks.peers.gradserve.server",
            worker="benchmarks.peers.gradserve.torch_training",
            num_workers=num_workers,
            options=_options(num_workers) | {"hook": hook, "transport": "shared_memory", "in_place": False},
        )

    return Comparison(
        title=f"ResNet-18 in PyTorch, {num_workers} worker{'s' * (num_workers > 1)}, "
        f"{_NUM_IMAGES} images of {_IMAGE_SIZE} x {_IMAGE_SIZE} each",
        contestants=(own(_AVERAGING, hook=False), own(_HOOK, hook=True), peer),
        num_bytes=_NUM_BYTES,
        steps=_STEPS,
        targets=tuple(Target(peer.label, (peer.label,), speed, label) for label in (_AVERAGING, _HOOK)),
        num_own=2,
    )
