"""GetServerStatus: from the request to a picture of the server, and back to a message."""

from gradserve.server_status import ServerStatus
from gradserve.v1 import status_messages_pb2 as messages_pb2
from gradserve.wire.messages import fill
from gradserve_server.errors import InvalidArgumentError
from gradserve_server.observe.status.request import Order, StatusRequest
from gradserve_server.security.identity import Identity

_ORDERS = {
    messages_pb2.GetServerStatusRequest.ORDER_UNSPECIFIED: Order.LATEST,
    messages_pb2.GetServerStatusRequest.ORDER_NAME: Order.NAME,
    messages_pb2.GetServerStatusRequest.ORDER_RATE: Order.RATE,
    messages_pb2.GetServerStatusRequest.ORDER_WAITING: Order.WAITING,
    messages_pb2.GetServerStatusRequest.ORDER_BYTES: Order.BYTES,
}


def decode_status_request(request: messages_pb2.GetServerStatusRequest, user: Identity) -> StatusRequest:
    """Returns what a request asks for.

    Raises:
        InvalidArgumentError: A maximum is larger than allowed, or the order is unknown.
    """
    order = _ORDERS.get(request.order)
    if order is None:
        raise InvalidArgumentError(f"expected an order of GetServerStatusRequest, got {request.order}", field="order")
    default = StatusRequest()
    return StatusRequest(
        user=user,
        container=request.container,
        name_contains=request.name_contains,
        order=order,
        max_accumulators=request.max_accumulators or default.max_accumulators,
        max_rounds=request.max_rounds or default.max_rounds,
        max_workers=request.max_workers or default.max_workers,
    )


def encode_status(status: ServerStatus) -> messages_pb2.GetServerStatusResponse:
    """Returns a picture as a message."""
    message = messages_pb2.GetServerStatusResponse()
    fill(message, status)
    return message
