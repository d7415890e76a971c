"""gradserve with `await`: the classes and arguments of `gradserve`, as coroutines.

async with gradserve.aio.connect("localhost:50051") as client:
    acc = await client.conditional_accumulator("float32", shape=(3,), shared_name="w")
    await acc.apply_grad([1.0, 2.0, 3.0], local_step=0)
    mean = await acc.take_grad(1)
"""

from gradserve.aio.batch_norm_layer import BatchNormLayer
from gradserve.aio.client import (
    Accumulator,
    Client,
    ConditionalAccumulator,
    GradientAccumulator,
    Parameters,
    SparseConditionalAccumulator,
    connect,
)
from gradserve.aio.raw_ops import RawOps
from gradserve.public_names import publish as _publish

__all__ = [
    "Accumulator",
    "BatchNormLayer",
    "Client",
    "ConditionalAccumulator",
    "GradientAccumulator",
    "Parameters",
    "RawOps",
    "SparseConditionalAccumulator",
    "connect",
]

_publish(__name__, globals(), __all__)
