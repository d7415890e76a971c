"""Batch normalization layers, called from blocking code. `gradserve.aio` has the same with `await`."""

from __future__ import annotations

from typing import Any, Self

from numpy.typing import NDArray

from gradserve.calls.batch_norm.layer import BatchNormLayerCalls
from gradserve.face import BlockingFace, BriefErrors, blocking
from gradserve.public_names import shown


class BatchNormLayer(BlockingFace[BatchNormLayerCalls]):
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

    @property
    def variables(self) -> dict[str, NDArray[Any]]:
        """All variables by name, read from the server; see `get_variables`."""
        return self.get_variables()

    def __repr__(self) -> str:
        return shown(self, self._calls.description)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        with BriefErrors():
            self._transport.run(self._calls.leave())

    __call__ = blocking(BatchNormLayerCalls.__call__)
    forward = blocking(BatchNormLayerCalls.forward)
    backward = blocking(BatchNormLayerCalls.backward)
    run_updates = blocking(BatchNormLayerCalls.run_updates)
    release = blocking(BatchNormLayerCalls.release)
    get_variables = blocking(BatchNormLayerCalls.get_variables)
    set_variables = blocking(BatchNormLayerCalls.set_variables)
    describe = blocking(BatchNormLayerCalls.describe)
    delete = blocking(BatchNormLayerCalls.delete)
