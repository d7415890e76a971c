"""Gradients of requests, made without messages."""

from collections.abc import Mapping
from copy import copy
from typing import TypeAlias

from gradserve_server.accumulators.incoming import IncomingComponent, IncomingGradient
from gradserve_server.tensors.incoming import IncomingTensor, IncomingTensors
from gradserve_server.tensors.payload import NO_PAYLOAD, Payload

Values: TypeAlias = IncomingTensor | tuple[IncomingTensor, IncomingTensor] | None
"""A dense value, or the indices and the rows of a sparse one, or none."""


def named(tensor: IncomingTensor, field: str) -> IncomingTensor:
    """Returns a tensor as the field of a request."""
    own = copy(tensor)
    own.field = field
    return own


def gradient_of(
    values: Mapping[str, Values], payload: Payload = NO_PAYLOAD, *, release: bool = False
) -> IncomingGradient:
    """Returns the gradient of a request with these components, in this order."""
    components: list[IncomingComponent] = []
    tensors: list[IncomingTensor] = []
    for index, (name, value) in enumerate(values.items()):
        field = f"gradient[{index}]"
        if isinstance(value, tuple):
            indices, rows = named(value[0], f"{field}.sparse.indices"), named(value[1], f"{field}.sparse.values")
            tensors += [indices, rows]
            components.append(IncomingComponent(name, rows, indices))
            continue
        dense = None if value is None else named(value, f"{field}.dense")
        if dense is not None:
            tensors.append(dense)
        components.append(IncomingComponent(name, dense))
    return IncomingGradient(components, IncomingTensors(tensors, payload), release)
