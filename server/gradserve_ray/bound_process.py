"""Becomes a server that ends when its actor does: `python -m gradserve_ray.bound_process PARENT FLAG...`.

Ray ends actors with SIGKILL, and a server that outlived its actor would keep its port and its state directory from the
next one.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Asks Linux for SIGKILL at the end of the parent's thread, and becomes the server."""
    parent, flags = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:  # It has ended before.
        sys.exit(1)
    os.execv(sys.executable, [sys.executable, "-m", "gradserve_server", "serve", *flags])


if __name__ == "__main__":
    main()
