"""A process group of one process, as each worker of a run has it."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch.distributed


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Makes the default process group, of this process alone, until the end of the block."""
    store = torch.distributed.FileStore(str(folder / "process-group"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()
