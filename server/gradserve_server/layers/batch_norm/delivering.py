"""Calls of a layer with the tensors of requests, and the delivery of their results."""

from dataclasses import dataclass

from gradserve_server.devices.device import Array
from gradserve_server.layers.batch_norm.calls import ForwardCall, ForwardResult
from gradserve_server.layers.batch_norm.layer import BatchNormLayer
from gradserve_server.layers.batch_norm.spec import CallInputs
from gradserve_server.ops.runner import OpenInputs, arrays_of
from gradserve_server.tensors.delivery import Delivered, Delivery


@dataclass(frozen=True)
class OutputsGradient:
    """The only input of a backward in a request."""

    outputs_gradient: Array


async def deliver_forward(
    layer: BatchNormLayer, opened: OpenInputs[CallInputs], call: ForwardCall, delivery: Delivery
) -> tuple[ForwardResult, Delivered]:
    """Computes a forward; returns its result and its delivered outputs. Raises what the layer raises."""
    keeps = delivery.keeps(opened.inputs.inputs.nbytes)
    # What is kept of the forward refers to its inputs, too.
    opened.tensors.share()
    delivered: list[Delivered] = []
    result = await layer.forward(
        opened.inputs,
        call,
        on_host=not keeps,
        deliver=lambda outputs: delivered.extend(delivery.deliver([outputs], shared=True)),
        room=delivery.room,
    )
    opened.tensors.relocate(result.moved, delivery.room)
    (outputs,) = delivered
    return result, outputs


async def deliver_backward(
    layer: BatchNormLayer, opened: OpenInputs[OutputsGradient], forward_id: str, delivery: Delivery, *, retain: bool
) -> dict[str, Delivered]:
    """Computes the gradients of a forward; returns them as delivered, by name. Raises what the layer raises."""
    checked = layer.check_backward(forward_id, opened.inputs.outputs_gradient)
    delivered: dict[str, Delivered] = {}
    computed = await layer.backward(
        checked,
        retain=retain,
        on_host=not delivery.keeps(checked.checked.output_bytes),
        deliver=lambda gradients: delivered.update(delivery.deliver_named(arrays_of(gradients))),
        room=delivery.room,
    )
    opened.tensors.relocate(computed.moved, delivery.room)
    return delivered
