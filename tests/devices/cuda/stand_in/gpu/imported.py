"""Memory of another process."""

import mmap
from dataclasses import dataclass
from pathlib import Path

from tests.devices.cuda.stand_in.gpu.ranges import Allocation, bytes_at

TOKEN_BYTES = 16


@dataclass
class Imported(Allocation):
    """An allocation of another process, which is open here.

    CUDA leaves undefined what happens to those who have memory open that its process frees: here a use is a fault. What
    a process leaves when it dies stays, unless the settings say that it is a fault, too.
    """

    mapping: mmap.mmap | None = None
    token: bytes = b""
    exporter: int = 0
    outlives: bool = True
    openings: int = 1

    def why_gone(self) -> str | None:
        """Returns why the memory may not be used any more; None if it may."""
        if bytes(bytes_at(self.start - mmap.PAGESIZE, TOKEN_BYTES)) != self.token:
            return "it was freed there"
        if not self.outlives and not Path(f"/proc/{self.exporter}").exists():
            return "that process has ended"
        return None
