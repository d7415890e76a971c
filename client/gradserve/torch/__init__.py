"""Trains PyTorch models together with other workers, and computes gradient ops on a server.

Where the server holds the parameters, a worker is a loop. One that comes later, or was too late, goes on from the
newest version like all others:

parameters = client.parameters(parameters_of(model), shared_name="net", num_required=4)
version = parameters.read()
while version.step < 1000:
    load_version(model, version)
    train_some_steps(model, optimizer)
    version = parameters.push_pull(delta_of(model, version), version).version

Where each worker has an optimizer of its own, `average_gradients` averages what its steps take.

Needs PyTorch: `pip install '.[torch]'` in a checkout of gradserve.
"""

from gradserve_protocol.extras import require_frameworks

require_frameworks("gradserve.torch", "torch", torch="PyTorch")

from gradserve.public_names import publish as _publish
from gradserve.torch import functions
from gradserve.torch.averaging import Averaging, average_gradients, broadcast_parameters
from gradserve.torch.diloco import DiLoCo, LocalSGD
from gradserve.torch.hooks import CommHook, all_reduce_hook, comm_hook
from gradserve.torch.parameters import delta_of, gradients_of, load_version, parameters_of

__all__ = [
    "Averaging",
    "CommHook",
    "DiLoCo",
    "LocalSGD",
    "all_reduce_hook",
    "average_gradients",
    "broadcast_parameters",
    "comm_hook",
    "delta_of",
    "functions",
    "gradients_of",
    "load_version",
    "parameters_of",
]

_publish(__name__, globals(), __all__)
