"""Who may hand over memory of the GPU."""

import os
from dataclasses import dataclass

from gradserve_server.config import GpuSharingUsers
from gradserve_server.devices.device import GpuSharing


@dataclass(frozen=True)
class GpuAccess:
    """The GPU, for the clients of a machine.

    Attributes:
        sharing: Opens their memory; None if there is no GPU.
        users: Whose memory.
    """

    sharing: GpuSharing | None
    users: GpuSharingUsers

    def why_not(self, uid: int | None, pid: int | None) -> str:
        """Returns why a process of a user may not hand over memory; empty if it may."""
        if self.users == "off":
            return "the server does not allow it (gpu_sharing: off)"
        if self.sharing is None:
            return "the server computes on the CPU, or its driver does not say on which GPU"
        if pid == os.getpid():
            return "the server is in the same process, where CUDA does not open its handles"
        if self.users == "user" and uid != os.getuid():
            return "the server is another user's, and allows it to that user only (gpu_sharing: user)"
        return ""


NO_GPU = GpuAccess(None, "off")
