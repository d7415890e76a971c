"""A process group of one process, as each worker of a run has it."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch.distributed
from torch.nn.parallel import DistributedDataParallel


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Makes the default process group, of this process alone, until the end of the block."""
    store = torch.distributed.FileStore(str(folder / "process-group"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()
        # PyTorch notes the replica whose forward is under way once for all threads. Two replicas in threads can leave
        # one of them noted, and torch.compile then divides everything later in the process by its buckets.
        DistributedDataParallel._active_ddp_module = None
