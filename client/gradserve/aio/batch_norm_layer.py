"""Batch normalization layers, called with `await`."""

from __future__ import annotations

from typing import Self

from gradserve.calls.batch_norm.layer import BatchNormLayerCalls
from gradserve.face import AsyncFace, BriefErrors, awaiting
from gradserve.public_names import shown


class BatchNormLayer(AsyncFace[BatchNormLayerCalls]):
    """A batch normalization layer whose variables live on the server: tf.contrib.layers.batch_norm, served.

    Made by `Client.batch_norm`. A context manager: on leaving, it deletes a layer without a scope. Of a layer with a
    scope, it releases what the server keeps for the gradients of this object's forwards; their updates can still be
    run.
    """

    @property
    def name(self) -> str:
        """The layer's name on the server: the scope."""
        return self._calls.name

    @property
    def container(self) -> str:
        """The namespace of the layer's name."""
        return self._calls.container

    def __repr__(self) -> str:
        return shown(self, self._calls.description)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        with BriefErrors():
            await self._transport.run(self._calls.leave())

    __call__ = awaiting(BatchNormLayerCalls.__call__)
    forward = awaiting(BatchNormLayerCalls.forward)
    backward = awaiting(BatchNormLayerCalls.backward)
    run_updates = awaiting(BatchNormLayerCalls.run_updates)
    release = awaiting(BatchNormLayerCalls.release)
    get_variables = awaiting(BatchNormLayerCalls.get_variables)
    set_variables = awaiting(BatchNormLayerCalls.set_variables)
    describe = awaiting(BatchNormLayerCalls.describe)
    delete = awaiting(BatchNormLayerCalls.delete)
