"""Trains PyTorch models together with other workers, and computes gradient ops on a server.

Needs PyTorch: `pip install '.[torch]'` in a checkout of gradserve.
"""

from gradserve_protocol.extras import require_frameworks

require_frameworks("gradserve.torch", "torch", torch="PyTorch")

from gradserve.public_names import publish as _publish
from gradserve.torch import functions
from gradserve.torch.all_reduce_hook import all_reduce_hook
from gradserve.torch.averaging import Averaging, average_gradients, broadcast_parameters
from gradserve.torch.comm_hook import CommHook, comm_hook

__all__ = [
    "Averaging",
    "CommHook",
    "all_reduce_hook",
    "average_gradients",
    "broadcast_parameters",
    "comm_hook",
    "functions",
]

_publish(__name__, globals(), __all__)
