"""Trains PyTorch models together with other workers, and computes gradient ops on a server.

Three ways, each a block around a training loop that stays as it is:

* `DiLoCo` and `LocalSGD`: workers train by themselves, and synchronize every so many steps. The server holds the model.
* `ParameterServer`: the server holds the model and takes the optimizer's steps, with the workers' gradients.
* `average_gradients`: each worker takes the steps, with the mean of all workers' gradients.

with gradserve.connect("server:50051") as client, DiLoCo(
    client, model, optimizer, sync_every=100, name="llm", num_required=4
):
    train(model, optimizer)

Needs PyTorch: `pip install '.[torch]'` in a checkout of gradserve.
"""

from gradserve_protocol.extras import require_frameworks

require_frameworks("gradserve.torch", "torch", torch="PyTorch")

from gradserve.public_names import publish as _publish
from gradserve.torch import functions
from gradserve.torch.averaging import Averaging, average_gradients, broadcast_parameters
from gradserve.torch.diloco import DiLoCo, LocalSGD
from gradserve.torch.hooks import CommHook, all_reduce_hook, comm_hook
from gradserve.torch.parameter_server import ParameterServer
from gradserve.torch.parameters import delta_of, gradients_of, load_version, parameters_of

__all__ = [
    "Averaging",
    "CommHook",
    "DiLoCo",
    "LocalSGD",
    "ParameterServer",
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
