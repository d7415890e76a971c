"""Shares out the samples of a training run, whose workers come, die and return.

A run goes through one endless sequence: the samples of epoch 0 in an order that follows from seed and epoch, those of
epoch 1 in another order, and so on. It is cut into blocks, each of what one worker takes in one step. Nobody hands
blocks out: all workers at a step know which blocks have counted so far and which workers were in the last round, and
from that each computes its own block. A block counts if the gradient of its worker counted in its round; otherwise it
is among the first blocks of the next step. So every sample counts exactly once per epoch.

`blocks` is what has counted, whose block is whose, and the order of an epoch. `batches` are those of a dataset or of a
stream. `prefetch` loads them ahead.

import gradserve.data

sampler = gradserve.data.sampler(dataset, seed=0, batch_size=32)
loader = torch.utils.data.DataLoader(dataset, batch_sampler=sampler)
with gradserve.torch.average_gradients(client, model, optimizer, num_required=4, name="net", data=sampler):
    while sampler.epoch < 3:
        for inputs, targets in loader:
            ...
"""

from gradserve.data.batches import Batches, Sampler, Stream, sampler, stream
from gradserve.data.prefetch import Prefetched
from gradserve.public_names import publish as _publish

__all__ = ["Batches", "Prefetched", "Sampler", "Stream", "sampler", "stream"]

_publish(__name__, globals(), __all__)
